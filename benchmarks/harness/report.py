"""The results beside the targets: as a table, as JSON, and as dated files."""

from __future__ import annotations

import datetime
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.contest import Ratio, Times
from benchmarks.harness.machine import machine, versions
from benchmarks.harness.options import Options

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Target:
    """A ratio that was found, and where it should be."""

    claim: str
    found: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def known(self) -> bool:
        """Whether there was somebody to compare with."""
        return not math.isnan(self.found)

    @property
    def met(self) -> bool:
        """Whether it is there."""
        enough = self.at_least is None or self.found >= self.at_least
        return enough and (self.at_most is None or self.found <= self.at_most)

    @property
    def verdict(self) -> str:
        """What to say of it."""
        if not self.known:
            return "not measured"
        return ("met" if self.met else "NOT met") if self.bound else "for information"

    @property
    def bound(self) -> str:
        """Where it should be, in words; empty for information only."""
        words = []
        if self.at_least is not None:
            words.append(f"at least {self.at_least:g}")
        if self.at_most is not None:
            words.append(f"at most {self.at_most:g}")
        return ", ".join(words)

    def as_json(self) -> dict[str, Any]:
        """What is known; the quartiles of the rounds, if it is a ratio over several."""
        facts: dict[str, Any] = {
            "claim": self.claim,
            "found": round(self.found, 4) if self.known else None,
            "target": self.bound or None,
            "met": self.met if self.known else None,
        }
        if isinstance(self.found, Ratio):
            facts["quartiles"] = [round(each, 4) for each in self.found.quartiles]
        return facts


@dataclass
class Report:
    """The result of one benchmark.

    Attributes:
        options: What it was run with.
        title: One line.
        columns: The columns of the table, the first of which names the row.
        rows: Its rows, as they are printed.
        targets: The ratios that the claim is about.
        notes: What the reader must know to read the figures.
    """

    options: Options
    title: str
    columns: tuple[str, ...] = ("", "ms, median", "quartiles")
    rows: list[tuple[str, ...]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def times(self, times: Mapping[str, Times], *more: Mapping[str, str]) -> None:
        """Add a row for each contestant, with its cell of each of ``more`` at the end."""
        for name, each in times.items():
            cells = [cells.get(name, "") for cells in more]
            if not each.seconds:
                self.rows.append((name, "not installed", "", *cells))
                continue
            low, high = each.quartiles
            middle = f"{1e3 * low:.2f} .. {1e3 * high:.2f}"
            self.rows.append((name, f"{1e3 * each.median:.2f}", middle, *cells))

    def target(
        self,
        claim: str,
        found: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Add a ratio, and where it should be; without a bound it is information."""
        self.targets.append(Target(claim, found, at_most, at_least))

    def publish(self) -> None:
        """Print it, and write it to ``benchmarks/results/`` if that was asked for."""
        Console(width=118).print(*self._tables(), *self.notes, sep="\n")
        text = json.dumps(self.as_json(), indent=2)
        print(text)
        if self.options.save:
            stem = f"{datetime.date.today()}-{self.options.name}"
            (RESULTS / f"{stem}.json").write_text(text + "\n", encoding="utf-8")
            (RESULTS / f"{stem}.md").write_text(self.as_markdown(), encoding="utf-8")
            print(f"written to benchmarks/results/{stem}.md and .json")

    def as_json(self) -> dict[str, Any]:
        """Everything, with the machine and the versions."""
        return {
            "benchmark": self.options.name,
            "command": self.options.command,
            "date": str(datetime.date.today()),
            "machine": machine(),
            "versions": versions(),
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "targets": [each.as_json() for each in self.targets],
            "notes": self.notes,
        }

    def as_markdown(self) -> str:
        """The same to read."""
        facts = {"command": f"`{self.options.command}`", **machine(), **versions()}
        head = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
        drawn = io.StringIO()
        Console(width=118, file=drawn).print(*self._tables(), sep="\n")
        notes = "".join(f"\n{note}\n" for note in self.notes)
        title = f"# {self.options.name}, {datetime.date.today()}"
        return f"{title}\n\n| | |\n|---|---|\n{head}\n\n```\n{drawn.getvalue()}```\n{notes}"

    def _tables(self) -> list[Table]:
        table = Table(title=self.title)
        for k, column in enumerate(self.columns):
            table.add_column(column, justify="right" if k else "left")
        for row in self.rows:
            table.add_row(*row)
        if not self.targets:
            return [table]
        ratios = Table(title="Ratios: median over the rounds")
        for k, column in enumerate(("", "found", "target", "")):
            ratios.add_column(column, justify="right" if k in (1, 2) else "left")
        for each in self.targets:
            ratios.add_row(each.claim, f"{each.found:.3f}", each.bound, each.verdict)
        return [table, ratios]
