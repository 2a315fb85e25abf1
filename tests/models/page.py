"""The page of the documentation that says which models were tried, with what result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.models.results import Result
from tests.models.settings import CHUNKS

_TOP = f"""\
# Tested models

Each model below was built small, with random weights, without dropout and else by its defaults,
such as `use_cache=True`, and run as a pipeline with {CHUNKS} micro-batches. *Same* means that
everything the model returns, the gradients of all parameters, the buffers and the keys of the state
dict equal those of the plain model, up to rounding. In training, models with batch norms are
compared with the plain model run on one micro-batch after another. Most torchvision models with
more than 25 million parameters are shortened: of several equal blocks in a row, two are kept.

*Runs* is the number of settings in which a model was compared. 18 are all combinations of 2, 3 and
4 stages, `activation_checkpointing` `"never"`, `"except_last"` and `"always"`, and training and
evaluation, alternately with and without threads. 20 are these, and `schedule="1f1b"` with and
without threads, which is for one pipelined module. 6 include each value of the 18 at least once,
but not all combinations; 7 are these and `schedule="1f1b"`. 3 and fewer are some of these 7, for
models with steps that take seconds.

`make models` runs all models and writes this page. `make models ARGS="--write docs/models.md timm"`
runs a part of them and keeps the other results, each with its versions.
"""


def page(results: Mapping[str, Sequence[Result]]) -> str:
    """The page, in Markdown.

    Args:
        results: Those of each library, by its name.
    """
    return "\n".join([_TOP, *(_section(name, found) for name, found in results.items() if found)])


def _section(library: str, found: Sequence[Result]) -> str:
    return "\n".join(
        [
            f"## {library}: {sum(each.same for each in found)} of {len(found)}",
            "",
            "| model | pipelined part | runs | result | with |",
            "|---|---|---|---|---|",
            *_rows(found),
            "",
        ]
    )


def _rows(found: Sequence[Result]) -> Iterator[str]:
    for each in found:
        piped = ", ".join(f"`{path}`" for path in each.paths) or "the model"
        versions = ", ".join(f"{name} {number}" for name, number in each.versions.items())
        yield f"| {each.name} | {piped} | {each.settings} | {_result(each)} | {versions} |"


def _result(result: Result) -> str:
    if result.failed:
        count = f"{result.failed} of {result.settings}"
        return f"**fails** in {count} settings: {_cell(result.said)}"
    return f"refused: {_cell(result.said)}" if result.said else "same"


def _cell(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split()).replace("|", "\\|")
