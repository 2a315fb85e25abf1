"""The options that every benchmark has."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

Options = argparse.Namespace


def options(
    name: str, doc: str | None, *, rounds: int, argv: Sequence[str] | None = None, **more: Any
) -> Options:
    """Read the command line: ``--rounds``, ``--save``, and an option for each of ``more``.

    Args:
        name: The benchmark's module, such as ``overhead``.
        doc: Its docstring.
        rounds: How many by default.
        argv: The arguments, those of the process by default.
        more: The defaults of further options, which also give their types.

    Returns:
        The options, with the ``command`` that gives them.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="how many count")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/")
    for option, default in more.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    given = list(sys.argv[1:] if argv is None else argv)
    found = parser.parse_args(given)
    shown = [word for word in given if word != "--save"]
    found.command = shlex.join(["python", "-m", f"benchmarks.{name}", *shown])
    found.name = name
    return found
