"""Shared by the benchmarks: a fair contest, and a report that names the machine.

A benchmark names its contestants, each an implementation of the same step; :func:`agree` checks
that their gradients agree, :func:`contest` times them in turns, and a :class:`Report` prints the
results beside the targets. Its file states the claim in its docstring, and has a ``main()``::

    python -m benchmarks.overhead            # a table, and the same as JSON
    python -m benchmarks.overhead --save     # and as dated files in benchmarks/results/
"""

from benchmarks.harness.contest import (
    Contestant,
    Times,
    agree,
    competitor,
    contest,
    in_one,
    ratio,
)
from benchmarks.harness.options import Options, options
from benchmarks.harness.report import Report, Target

__all__ = [
    "Contestant",
    "Options",
    "Report",
    "Target",
    "Times",
    "agree",
    "competitor",
    "contest",
    "in_one",
    "options",
    "ratio",
]
