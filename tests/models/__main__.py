"""Compares models with pipelines of them: ``python -m tests.models``, or ``make models``."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import tests.models.torchvision_operators  # noqa: F401 - before Lightning
from tests.models import libraries
from tests.models.case import Case
from tests.models.libraries import Library
from tests.models.page import page
from tests.models.results import Result, Results
from tests.models.settings import settings_of
from tests.models.trial import Trial, attempt

_LIMIT = 1200  # seconds for a case on a busy machine; a pipeline that takes longer hangs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as asked; the exit status is 1 if a case fails."""
    options = _options().parse_args(arguments)
    torch.set_num_threads(1)
    trials: list[Trial] = []
    for library in libraries.chosen(options.libraries):
        results = Results(library.name)
        cases = [
            case
            for case in library.cases
            if (not options.only or any(part in case.name for part in options.only))
            and not (options.missing and case.name in results)
        ]
        for trial in _trials(library, cases, options.settings):
            trials.append(trial)
            if options.write is not None:
                results.keep(Result.of(trial, library.packages))
    failed = [each for each in trials if not each.passed]
    print(f"{len(trials) - len(failed)} of {len(trials)} models as expected")
    if options.write is not None:
        options.write.write_text(_page(), "utf-8")
    if options.failures is not None:
        options.failures.write_text("\n".join(map(_report, failed)), "utf-8")
    return 1 if failed else 0


def _page() -> str:
    """The page of all results that are kept, in the order of the cases."""
    names = {each: [case.name for case in each.cases] for each in libraries.chosen([])}
    return page({each.name: Results(each.name).in_order(found) for each, found in names.items()})


def _give_back() -> None:
    """Let the system have the memory of the models before: two hundred of them fill a machine."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps what was freed in the arenas of its threads
        libc.malloc_trim(0)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(libraries.NAMES)}; else all")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of models")
    parser.add_argument("--settings", type=int, help="how many for each model; else all of them")
    parser.add_argument("--missing", action="store_true", help="only those without a result")
    parser.add_argument("--write", type=Path, help="keep the results; the page to write of all")
    parser.add_argument("--failures", type=Path, help="the file for what failed, in Markdown")
    return parser


def _trials(library: Library, cases: Sequence[Case], settings: int | None) -> Iterator[Trial]:
    for case in cases:
        faulthandler.dump_traceback_later(_LIMIT, exit=True)
        began = time.process_time()
        trial = attempt(case, settings_of(case, library.settings, settings))
        faulthandler.cancel_dump_traceback_later()
        print(f"{_mark(trial):10}{case.name} ({time.process_time() - began:.1f} s)", flush=True)
        for failure in trial.failures[:1]:
            print(_indented(failure.what), flush=True)
        yield trial
        _give_back()


def _mark(trial: Trial) -> str:
    if not trial.passed:
        return f"FAILED {len(trial.failures)}"
    return "refused" if trial.refusal else "same"


def _report(trial: Trial) -> str:
    lines = [f"## {trial.case.name}: {len(trial.failures)} of {trial.settings} settings fail"]
    lines += [f"\n{each.setting}\n\n{_indented(each.what)}" for each in trial.failures[:2]]
    return "\n".join([*lines, ""])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines()[-12:])


if __name__ == "__main__":
    sys.exit(main())
