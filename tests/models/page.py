"""The page of the documentation that says which models were tried, with what result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

from tests.models.libraries import Library
from tests.models.settings import CHUNKS
from tests.models.trial import Trial

_TOP = f"""\
# Models that were tried

Each model below was built small, with random weights and without dropout, and run as a pipeline
with {CHUNKS} micro-batches. *Same* means: everything that the model returns, the gradients of all
parameters, the buffers and the keys of the state dict are those of the plain model, up to rounding.
In training, models with batch norms are compared with the plain model on one micro-batch after the
other.

*Runs* counts the settings in which a model was compared. 18 are 2, 3 and 4 stages, each with
`activation_checkpointing` `"never"`, `"except_last"` and `"always"`, each in training and
evaluation, with and without threads by turns. 6 have each of these at least once, but not with one
another; 3 and fewer are some of these 6, as for models of which each step takes seconds.

`make models` writes this page. This one is of {{versions}}.
"""


def page(trials: Mapping[Library, Sequence[Trial]]) -> str:
    """The page, in Markdown."""
    names = ["torch", *(each.name for each in trials if each.name != "guide")]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    sections = [_section(library, found) for library, found in trials.items()]
    return "\n".join([_TOP.format(versions=versions), *sections])


def _section(library: Library, trials: Sequence[Trial]) -> str:
    same = sum(trial.passed and not trial.refusal for trial in trials)
    title = f"## {library.name}: {same} of {len(trials)}"
    return "\n".join(
        [
            title,
            "",
            "| model | what is piped | runs | result |",
            "|---|---|---|---|",
            *_rows(trials),
            "",
        ]
    )


def _rows(trials: Sequence[Trial]) -> Iterator[str]:
    for trial in trials:
        yield f"| {trial.case.name} | {_piped(trial)} | {trial.settings} | {_result(trial)} |"


def _piped(trial: Trial) -> str:
    paths = trial.case.module
    if not paths:
        return "the model"
    return ", ".join(f"`{path}`" for path in ([paths] if isinstance(paths, str) else paths))


def _result(trial: Trial) -> str:
    if trial.failures:
        last = trial.failures[0].what.strip().splitlines()[-1]
        return f"**fails** in {len(trial.failures)} of {trial.settings} settings: {_cell(last)}"
    return f"refused: {_cell(trial.refusal)}" if trial.refusal else "same"


def _cell(text: str) -> str:
    """The text in one line, with the names of files from where packages are installed."""
    return re.sub(r"/\S*/site-packages/", "", " ".join(text.split())).replace("|", "\\|")
