"""Pages of the documentation: the fenced blocks in their source, and how those are run.

The blocks marked ``python`` of a page run in order, in one namespace, on the CPU. Two conventions::

    <!-- not run: needs GPUs -->    above a block: it is compiled only
    ```text                         right below a block: what it prints, but for white space; a
                                    Trainer may print more around it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
GUIDE = sorted(DOCS.glob("guide/*.md"))
SITE = sorted(DOCS.rglob("*.md"))

_NOT_RUN = re.compile(r"<!-- not run: .+ -->")


class Block(NamedTuple):
    """A fenced block: its language, its lines, and the last line with text above it."""

    language: str
    line: int
    text: str
    above: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; ``line`` is the number of the first line within."""
    lines = page.splitlines()
    above, k = "", 0
    while k < len(lines):
        if lines[k].startswith("```"):
            end = lines.index("```", k + 1)
            yield Block(lines[k][3:], k + 2, "\n".join(lines[k + 1 : end]) + "\n", above)
            k = end
        above = lines[k] or above
        k += 1


def prose(page: str) -> list[str]:
    """The lines outside of fenced blocks."""
    outside, found = True, []
    for line in page.splitlines():
        if line.startswith("```"):
            outside = not outside
        elif outside:
            found.append(line)
    return found


def run_blocks(
    page: Path,
    found: Iterable[Block],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run the blocks of a page in the current folder, and compare what they print."""
    found = list(found)
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # for pickles and dataclasses
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what a page shows may depend on its numbers, if rarely
        for block, below in zip_longest(found, found[1:]):
            if block.language != "python":
                continue
            # At its lines in the page, for tracebacks.
            code = "\n" * (block.line - 1) + block.text
            compiled = compile(code, str(page), "exec", dont_inherit=True)
            if _NOT_RUN.fullmatch(block.above):
                continue
            capsys.readouterr()
            exec(compiled, vars(module))
            if below is not None and below.language == "text" and below.above == "```":
                shown, printed = below.text.split(), capsys.readouterr().out.split()
                assert " ".join(shown) in " ".join(printed), f"line {below.line}"


def name_of(path: Path) -> str:
    """The path of a file in the repository."""
    return path.relative_to(ROOT).as_posix()
