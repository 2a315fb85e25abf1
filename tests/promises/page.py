"""Write the page of the promises and their tests: ``python -m tests.promises.page``.

The docstring of a test file begins with the name of its promise: ``No hang: an error in a layer
reaches the caller.`` A folder whose tests all hold one promise is listed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "promises.md"


class Promise(NamedTuple):
    """A promise to users.

    Attributes:
        name: The word or two with which the docstrings of its tests begin.
        sentence: The promise.
        folders: Folders whose tests hold it: paths in the repository, and what is in each.
    """

    name: str
    sentence: str
    folders: tuple[tuple[str, str], ...] = ()


PROMISES = [
    Promise(
        "Transparency",
        "Loss, gradients and buffers equal those of the plain module.",
    ),
    Promise(
        "Plain checkpoints",
        "Checkpoints have the keys, layout and optimizer indices of a single-device run.",
    ),
    Promise(
        "One autograd node",
        "A pipeline is one ordinary autograd node: each gradient arrives once per backward.",
    ),
    Promise(
        "Nothing silent",
        "The caller's state applies in every stage, and unsupported options raise an error.",
        (("tests/lightning/features", "each feature of Lightning, compared with a plain Trainer"),),
    ),
    Promise(
        "No hang",
        "An error reaches the caller, and the next step is correct.",
    ),
    Promise(
        "Cost",
        "Memory is bounded and freed. Time is measured by the benchmarks; tests count the calls of "
        "the engine's functions, and those that the strategy adds to a step.",
        (("benchmarks/README.md", "time and memory, compared with other pipelines"),),
    ),
    Promise(
        "Unchanged model",
        "The classes, hooks and names of the model stay the same.",
        (("tests/core/frontends", "the modules that can be pipelined"),),
    ),
    Promise(
        "Same numbers",
        "Results are the same with threads and without, in one process and in several, under a "
        "seed, and on GPUs, without races between streams.",
        (
            ("tests/gpu", "CUDA devices, real or simulated"),
            ("tests/simcuda/README.md", "simulated GPUs, on which a race between streams fails"),
        ),
    ),
    Promise(
        "Reported",
        "The pipeline ran, or the user is told; so is its cost.",
        (("tests/core/verify", "a run with the pipeline, compared with a plain run"),),
    ),
    Promise(
        "Peers",
        "Defects of other pipelines are absent.",
    ),
]

_HEAD = """\
# Promises and their tests

<!-- made by `python -m tests.promises.page`; edit the first line of a test file's docstring -->

The promises to users, and the tests of each. The docstring of a test file begins with the name of
its promise.
"""


def page() -> str:
    """Return the page, in Markdown."""
    tests: dict[str, list[tuple[str, str]]] = {promise.name: [] for promise in PROMISES}
    for path in sorted(TESTS.rglob("test_*.py")):
        name, sentence = promise_of(path)
        if name in tests:
            tests[name].append((path.relative_to(TESTS.parent).as_posix(), sentence))
    return "\n".join([_HEAD, *(_section(promise, tests[promise.name]) for promise in PROMISES)])


def promise_of(path: Path) -> tuple[str, str]:
    """Return the text before and after the first colon in the first line of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    name, _, sentence = docstring.partition("\n")[0].partition(": ")
    return name, sentence


def _section(promise: Promise, tests: list[tuple[str, str]]) -> str:
    rows = [*tests, *promise.folders]
    return "\n".join([f"## {promise.name}", "", promise.sentence, "", *_table(rows), ""])


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    yield "| test | what it shows |"
    yield "|---|---|"
    for path, sentence in rows:
        short = re.sub(r"^tests/|\.py$|/README\.md$", "", path)
        text = sentence.removesuffix(".").replace("``", "`")
        yield f"| [`{short}`](../{path}) | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
