"""Runs all benchmarks for one kind of machine, each in a process of its own.

    python -m benchmarks cpu            # those for 2 CPU cores, in under half an hour
    python -m benchmarks gpu            # those for one GPU and the tests for one, in under 8
    python -m benchmarks cpu --save     # and keep the results in benchmarks/results/

One that fails or takes too long does not stop the others. At the end there is a table of all
targets, with the figures of the last saved run on such a machine, and which of them got worse by
more than they vary within a run. The exit code tells whether everything ran, not whether the
targets were met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event, Timer
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.history import changes, latest_before


@dataclass(frozen=True)
class Run:
    """What is run, and the seconds that it may take."""

    name: str
    limit: float
    command: tuple[str, ...] = ()

    def arguments(self, *, save: bool) -> list[str]:
        """Of python; a benchmark is the module of its name."""
        if self.command:
            return list(self.command)
        return ["-m", f"benchmarks.{self.name}", *["--save"] * save]


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        problem: Why it did not run to its end; empty if it did.
        reports: What it published, as JSON gives it.
    """

    run: Run
    seconds: float = 0.0
    problem: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)


# Some tests may need a package that the machine lacks; those for a GPU run anyway. They run beside
# one another, which ends pytest where pytest-benchmark is installed, too.
GPU_TESTS = (
    *("-m", "pytest", "-m", "gpu", "--quiet", "--continue-on-collection-errors"),
    *("--numprocesses=8", "--dist=worksteal", "-p", "no:benchmark"),
)


@dataclass(frozen=True)
class Kind:
    """The runs for a kind of machine, and the seconds for all of them."""

    runs: Sequence[Run]
    seconds: float


KINDS = {
    "cpu": Kind(
        [
            Run("overhead", 100),
            Run("first_steps", 60),
            Run("cpu_pipeline", 180),
            Run("peers", 240),
            Run("memory", 270),
            Run("trainer_overhead", 300),
            Run("recomputation", 120),
            Run("frontends", 120),
            Run("pretrained", 60),
            Run("rebalance", 60),
            Run("processes", 360),
            Run("bubble_audit", 120),
            Run("schedules", 120),
            Run("saved_bytes", 60),
            Run("stress", 60),
            Run("time_to_first_step", 210),
        ],
        seconds=30 * 60 - 10,
    ),
    "gpu": Kind(
        [
            Run("gpu tests", 200, GPU_TESTS),
            Run("unet_speed", 100),
            Run("amoebanet_speed", 100),
            Run("resnet_speed", 100),
            Run("stress", 100),
            Run("memory", 90),
            Run("bubble_audit", 60),
            Run("host_weights", 90),
            Run("overhead", 100),
        ],
        seconds=8 * 60 - 10,
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Run them, and tell."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these only")
    given = parser.parse_args(argv)
    kind = KINDS[given.kind]
    runs = [run for run in kind.runs if not given.only or run.name in given.only]
    console = Console(width=118)

    outcomes = []
    for outcome in execute_all(runs, kind.seconds, save=given.save):
        took = f"{outcome.run.name}: {outcome.problem or 'done'}, {outcome.seconds:.0f} s"
        console.rule(took, align="left")
        outcomes.append(outcome)
    console.print(*tables(outcomes), sep="\n")
    if failed := [each.run.name for each in outcomes if each.problem]:
        sys.exit(f"did not run to their end: {', '.join(failed)}")


def execute_all(runs: Iterable[Run], seconds: float, *, save: bool) -> Iterator[Outcome]:
    """One after another, as long as there is time."""
    end = time.monotonic() + seconds
    for run in runs:
        left = end - time.monotonic()
        if left > 0:
            yield execute(run, min(run.limit, left), save=save)
        else:
            yield Outcome(run, problem="no time was left for it")


def execute(run: Run, limit: float, *, save: bool) -> Outcome:
    """Run it for ``limit`` seconds at most; what it prints is printed, but for the JSON."""
    outcome, start, late = Outcome(run), time.monotonic(), Event()
    # Threads that spin while they wait are for programs that have the cores to themselves.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    with subprocess.Popen(
        [sys.executable, *run.arguments(save=save)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # so that it ends with all that it started
    ) as process:

        def stop() -> None:
            late.set()
            end_group(process)

        timer = Timer(limit, stop)
        timer.start()
        try:
            assert process.stdout is not None
            outcome.reports += echo(process.stdout)
            code = process.wait()
        finally:
            timer.cancel()
            end_group(process)
    outcome.seconds = time.monotonic() - start
    if late.is_set():
        outcome.problem = f"stopped after {limit:.0f} s"
    elif code:
        outcome.problem = f"failed with exit code {code}"
    return outcome


def end_group(process: subprocess.Popen[str]) -> None:
    """End what is left of a process and of all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def echo(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Print lines as they come, except those of a report as JSON: give its value."""
    block: list[str] | None = None
    for line in lines:
        if block is None and line == "{\n":
            block = []
        if block is None:
            print(line, end="", flush=True)
            continue
        block.append(line)
        if line == "}\n":
            yield json.loads("".join(block))
            block = None


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """What ran, and all targets."""
    ran = Table("", "seconds", "", title="What ran")
    found = Table("", "claim", "found", "target", "", "before", title="Targets")
    for outcome in outcomes:
        ran.add_row(outcome.run.name, f"{outcome.seconds:.0f}", outcome.problem or "done")
        for report in outcome.reports:
            former = latest_before(report)
            before = changes(report, former) if former else {}
            for target in report["targets"]:
                if target["target"] is None:
                    continue
                verdict = {True: "met", False: "NOT met", None: "not measured"}[target["met"]]
                number = "-" if target["found"] is None else f"{target['found']:.3f}"
                earlier, worse = before.get(target["claim"], (None, False))
                change = "" if earlier is None else f"{earlier:.3f}{', now WORSE' * worse}"
                found.add_row(
                    report["benchmark"], target["claim"], number, target["target"], verdict, change
                )
    return [ran, found]


if __name__ == "__main__":
    main()
