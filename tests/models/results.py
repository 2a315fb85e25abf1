"""The results of all cases that were run, whenever that was: a file for each library.

A run of everything takes over an hour. So each result is kept as soon as it is there, with the
versions that it is of, and the page is written from all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tests.models.trial import Trial

KEPT = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        name: What the model is called.
        paths: What is pipelined; none if it is the model itself.
        settings: The number of settings in which it was run.
        failed: The number of those in which it failed.
        said: What the pipeline said if it was refused; the last line of the first failure.
        versions: Those of torch, and of the library.
    """

    name: str
    paths: Sequence[str]
    settings: int
    failed: int
    said: str
    versions: Mapping[str, str]

    @classmethod
    def of(cls, trial: Trial, packages: Sequence[str]) -> Result:
        """The result of a trial, with the packages that are installed now."""
        module = trial.case.module
        paths = [module] if isinstance(module, str) else list(module)
        said = trial.failures[0].what.strip().splitlines()[-1] if trial.failures else trial.refusal
        said = re.sub(r"/\S*/site-packages/", "", said)  # which is where this machine has it
        versions = {name: version(name) for name in packages}
        paths = [path for path in paths if path]
        return cls(trial.case.name, paths, trial.settings, len(trial.failures), said, versions)

    @property
    def same(self) -> bool:
        """Whether the pipeline was the plain model in every setting."""
        return not self.said


class Results:
    """The results of a library.

    Args:
        library: Its name.
        folder: Where they are kept.
    """

    def __init__(self, library: str, folder: Path = KEPT) -> None:
        self._file = folder / f"{library}.json"
        kept = json.loads(self._file.read_text("utf-8")) if self._file.exists() else []
        self._found = {each["name"]: Result(**each) for each in kept}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def keep(self, result: Result) -> None:
        """Keep a result in the place of an earlier one of the same name."""
        self._found[result.name] = result
        text = json.dumps([asdict(each) for each in self._found.values()], indent=1)
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(f"{text}\n", "utf-8")

    def in_order(self, names: Sequence[str]) -> list[Result]:
        """Those of these names, in this order."""
        return [self._found[name] for name in names if name in self._found]
