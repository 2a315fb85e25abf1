"""Takes each effect of the engine out in turn: ``python -m tests.mutation``, or ``make mutate``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

from tests.mutation import declaration
from tests.mutation.explained import EXPLAINED
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.reach import Reach, instrument, measure
from tests.mutation.records import Records
from tests.mutation.sessions import Sessions
from tests.mutation.table import line_of, obsolete, summary, survivors, table
from tests.mutation.trees import Tree
from tests.mutation.trials import Trial, attempt

ROOT = Path(__file__).parents[2]
_ON_HOST = (
    "tests/core",
    "tests/promises",
    "tests/lightning",
    "tests/strategy",
    "tests/checkpoints",
    "tests/callbacks",
    "tests/distributed",
)
_SIMULATED = ("tests/gpu",)

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as asked; the exit status is 1 if there are survivors without an explanation."""
    options = _options().parse_args(arguments)
    if options.declaration:
        print(_declaration())
        return 0
    mutants = _chosen(options.modules or declaration.ROOMS, options.only)
    if options.list:
        print("\n".join(f"{each.kind:8}{each}" for each in mutants))
        return 0
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = [Tree(ROOT, scratch / f"copy{k}") for k in range(options.jobs)]
        records = Records(options.trials, ROOT, mutants)
        places = [(tree, Sessions(tree)) for tree in trees]
        for _, sessions in places:
            stack.callback(sessions.close)
        reach = _reach(places, options.tests, mutants, options.reach)
        trials = _trials(places, mutants, reach, records, options.budget)
    return _report(trials, options.results)


Place = tuple[Tree, Sessions]


def _reach(
    places: Sequence[Place], tests: Sequence[str], mutants: Sequence[Mutant], kept: Path | None
) -> Reach:
    """Run tests once, to see which effects they reach; all of them if nothing is known yet."""
    known = kept is not None and kept.exists()
    reach = Reach.load(kept) if kept is not None and known else Reach()
    files = [] if known and not tests else list(_files(tests))
    modules = dict.fromkeys(each.module for each in mutants)
    # Effects are counted per module, so whole modules are instrumented, whatever was chosen.
    every = [each for module in modules for each in _mutants_in(module)]
    for tree, _ in places:
        instrument(tree, every)

    def run(place: Place, path: str) -> None:
        simulated = path.startswith(_SIMULATED)
        measure(place[1], path, simulated=simulated, mutants=every, reach=reach)
        print(f"{path}: {len(reach.tests)} tests so far", file=sys.stderr)

    for path in files:
        reach.forget(path)
    _shared_out(places, files, run)
    for tree, _ in places:
        for module in modules:
            tree.restore(module)
    for test in reach.failed:
        print(f"left out, as it fails without a change: {test}", file=sys.stderr)
    if kept is not None:
        reach.save(kept)
    return reach


def _trials(
    places: Sequence[Place],
    mutants: Sequence[Mutant],
    reach: Reach,
    records: Records,
    budget: float,
) -> list[Trial]:
    trials = records.noticed()
    known = {trial.mutant for trial in trials}

    def run(place: Place, mutant: Mutant) -> None:
        trial = attempt(*place, mutant, reach, budget=budget)
        records.add(trial)
        trials.append(trial)
        print(f"{len(trials)}/{len(mutants)} {line_of(trial)}", flush=True)

    _shared_out(places, [each for each in mutants if each not in known], run)
    return trials


def _shared_out(
    places: Sequence[Place], work: Sequence[T], run: Callable[[Place, T], None]
) -> None:
    """Do all work, each place a piece at a time."""
    waiting = iter(work)
    lock, stopped = Lock(), Event()

    def take_turns(place: Place) -> None:
        while not stopped.is_set():
            with lock:
                piece = next(waiting, None)
            if piece is None:
                return
            run(place, piece)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            list(pool.map(take_turns, places))
        finally:
            stopped.set()  # an interrupt waits for the pieces at hand only


def _report(trials: Sequence[Trial], results: Path | None) -> int:
    if results is not None:
        title = "# Effects of the engine, taken out in turn\n\nWritten by `make mutate`.\n"
        results.write_text(f"{title}\n{table(trials, EXPLAINED)}", encoding="utf-8")
    print(summary(trials, EXPLAINED))
    left, outdated = survivors(trials, EXPLAINED), obsolete(trials, EXPLAINED)
    for each in left:
        print(f"survivor: {each.mutant}")
    for line in outdated:
        print(f"explained.py is out of date: {line}")
    return int(bool(left or outdated))


def _chosen(modules: Iterable[str], only: str) -> list[Mutant]:
    """The mutants of modules and folders, those that contain a text."""
    found = [each for path in modules for module in _modules(path) for each in _mutants_in(module)]
    return [each for each in found if only in str(each)]


def _modules(path: str) -> list[str]:
    """A module, or the modules in a folder; paths from the root."""
    found = sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]
    return [each.relative_to(ROOT).as_posix() for each in found]


def _mutants_in(module: str) -> list[Mutant]:
    return mutants_of(module, (ROOT / module).read_text(encoding="utf-8"))


def _files(tests: Sequence[str]) -> list[str]:
    """The test files to run, by default all that may concern the engine."""
    found = []
    for path in tests or (*_ON_HOST, *_SIMULATED):
        files = (
            sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else [ROOT / path]
        )
        found += [each.relative_to(ROOT).as_posix() for each in files]
    return found


def _declaration() -> str:
    kinds = [f"{kind:8}{words}" for kind, words in declaration.KINDS.items()]
    return "\n".join(
        [
            "Every statement whose value nobody takes is an effect, of the kind",
            *kinds,
            f"Context managers are made by: {declaration.MANAGERS}",
            f"No effect on a local variable: {declaration.BUILDING}",
        ]
    )


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules or folders; by default those of a run")
    parser.add_argument("--only", default="", help="those whose line, as printed, contains this")
    parser.add_argument("--tests", nargs="+", default=(), help="test files or folders to try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--budget", type=float, default=inf, help="seconds of tests per mutant")
    parser.add_argument(
        "--reach",
        type=Path,
        help="a file that keeps which tests reach what; with it only those of --tests run for that",
    )
    parser.add_argument(
        "--trials", type=Path, help="a file that keeps what was noticed, and is not tried again"
    )
    parser.add_argument("--results", type=Path, help="the file to write the table into")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--declaration", action="store_true", help="print what is taken out")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers too, as Ctrl-C does
    sys.exit(main())
