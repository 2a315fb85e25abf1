"""What the benchmarks have in common: a fair contest, and a report that says where it was held.

A benchmark names its contestants, each a way to do one and the same step; :func:`agree` makes sure
that they do, :func:`contest` times them in turns, and a :class:`Report` prints what was found
beside what was claimed. Its file says what is claimed in its docstring, and has a ``main()``::

    python -m benchmarks.overhead            # a table, and the same as JSON
    python -m benchmarks.overhead --save     # and as dated files in benchmarks/results/
"""

from benchmarks.harness.contest import Contestant, Times, agree, competitor, contest, ratio
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
    "options",
    "ratio",
]
