"""The result of a run as Markdown: what was noticed by which test, and what was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tests.mutation.explained import Explained
from tests.mutation.mutants import Mutant
from tests.mutation.trials import Trial

_WIDTH = 76  # characters of an effect


def explanation_of(mutant: Mutant, explained: Sequence[Explained]) -> Explained | None:
    """The explanation of a mutant, if it has one."""
    for each in explained:
        named = (
            mutant.module == f"lightning_gpipe/core/{each.module}" and mutant.where == each.where
        )
        if named and mutant.effect.startswith(each.effect):
            return each
    return None


def table(trials: Sequence[Trial], explained: Sequence[Explained]) -> str:
    """All of it: counts, then survivors, then each module."""
    return "\n".join(_lines(sorted(trials, key=_place), explained))


def summary(trials: Sequence[Trial], explained: Sequence[Explained]) -> str:
    """One sentence."""
    missed = sum(each.noticed is None for each in trials)
    left = len(survivors(trials, explained))
    return (
        f"{len(trials)} effects taken out in turn: {len(trials) - missed} noticed, "
        f"{missed - left} explained, {left} survivors."
    )


def survivors(trials: Sequence[Trial], explained: Sequence[Explained]) -> list[Trial]:
    """Those that were not noticed, and are not explained."""
    missed = [each for each in trials if each.noticed is None]
    return [each for each in missed if explanation_of(each.mutant, explained) is None]


def obsolete(trials: Sequence[Trial], explained: Sequence[Explained]) -> list[str]:
    """What the list of explanations should no longer say."""
    found = []
    modules = {each.mutant.module for each in trials}
    for entry in explained:
        if f"lightning_gpipe/core/{entry.module}" not in modules:
            continue
        own = [each for each in trials if explanation_of(each.mutant, [entry]) is not None]
        name = f"{entry.module} {entry.where}: {entry.effect}"
        if not own:
            found.append(f"{name}: there is no such effect")
        found += [f"{name}: noticed by {each.noticed}" for each in own if each.noticed is not None]
    return found


def line_of(trial: Trial) -> str:
    """One trial, as a line to print."""
    verdict = "NOT NOTICED" if trial.noticed is None else _test_of(trial)
    return f"{trial.mutant}\n    {verdict} ({trial.seconds:.1f} s)"


def _lines(trials: Sequence[Trial], explained: Sequence[Explained]) -> Iterator[str]:
    yield summary(trials, explained)
    yield ""
    missed = [each for each in trials if each.noticed is None]
    if missed:
        yield "## Not noticed"
        yield ""
        for each in missed:
            reason = explanation_of(each.mutant, explained)
            tests = f"{each.tried} of {each.reached_by} tests that reach it"
            yield f"- `{each.mutant.module}`, {each.mutant.where}: `{_short(each.mutant.effect)}` "
            yield f"  ({tests}). {'**Survivor.**' if reason is None else reason.reason}"
        yield ""
    for module, group in groupby(trials, key=lambda each: each.mutant.module):
        own = list(group)
        noticed = sum(each.noticed is not None for each in own)
        yield f"## {module}: {noticed} of {len(own)}"
        yield ""
        yield "| line | function | kind | taken out | noticed by | seconds |"
        yield "|---|---|---|---|---|---|"
        for each in own:
            mutant = each.mutant
            yield (
                f"| {mutant.line} | {mutant.where} | {mutant.kind} | `{_short(mutant.effect)}` "
                f"| {_verdict(each, explained)} | {each.seconds:.1f} |"
            )
        yield ""


def _place(trial: Trial) -> tuple[str, int, int]:
    return trial.mutant.module, trial.mutant.line, trial.mutant.index


def _verdict(trial: Trial, explained: Sequence[Explained]) -> str:
    if trial.noticed is not None:
        return _test_of(trial)
    return "explained" if explanation_of(trial.mutant, explained) else "**survivor**"


def _test_of(trial: Trial) -> str:
    name = (trial.noticed or "").removeprefix("tests/").replace("|", "\\|")
    return f"{name} (does not end)" if trial.hung else name


def _short(effect: str) -> str:
    text = effect if len(effect) <= _WIDTH else f"{effect[: _WIDTH - 3]}..."
    return text.replace("|", "\\|")
