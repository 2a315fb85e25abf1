"""Trials that were made are kept in a file, so that an interrupted run goes on where it was.

What was noticed is not tried again as long as its module stays as it is. A survivor is, because
there may be a new test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.trials import Trial


class Records:
    """The trials of earlier runs.

    Args:
        path: The file, a line of JSON for each trial; None to keep none.
        root: Where the modules are.
        mutants: Those that may be tried. Their modules are read now, as they may change later.
    """

    def __init__(self, path: Path | None, root: Path, mutants: Iterable[Mutant]) -> None:
        self._path = path
        self._keys = {mutant: _key(mutant, root) for mutant in mutants}
        lines = [] if path is None or not path.exists() else path.read_text("utf-8").splitlines()
        self._latest: dict[str, dict[str, Any]] = {}
        for line in lines:
            record = json.loads(line)
            self._latest[record["key"]] = record

    def noticed(self) -> list[Trial]:
        """The trials that need not be made again."""
        found = ((each, self._latest.get(key)) for each, key in self._keys.items())
        return [
            Trial(each, **record["trial"])
            for each, record in found
            if record is not None and record["trial"]["noticed"] is not None
        ]

    def add(self, trial: Trial) -> None:
        """Keep a trial."""
        if self._path is not None:
            details = {k: v for k, v in asdict(trial).items() if k != "mutant"}
            record = {"key": self._keys[trial.mutant], "trial": details}
            with self._path.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)


def _key(mutant: Mutant, root: Path) -> str:
    """The mutant, and the state of its module."""
    source = (root / mutant.module).read_bytes()
    return json.dumps([*mutant.key, blake2b(source, digest_size=8).hexdigest()])
