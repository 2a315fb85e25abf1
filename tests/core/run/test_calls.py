"""Cost: the number of calls of the engine's functions, the same on every machine.

A call takes part of a microsecond, and a nearly empty layer takes some ten. A feature that is not
in use must cost nothing. Time does not show it where one of many does; these numbers do.
"""

from __future__ import annotations

import json
import subprocess
import sys

from lightning_gpipe.core.schedules import ActivationCheckpointing

# Calls for each pair of stage and micro-batch, and beside those for each mini-batch, with a margin.
# Counted with Python 3.11; in later versions comprehensions are no calls.
AT_MOST: dict[ActivationCheckpointing, tuple[int, int]] = {
    "never": (43, 660),
    "always": (118, 790),
}


def test_calls_of_a_step() -> None:
    command = [sys.executable, "-m", "tests.support.calls"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)

    for mode, (per_pair, per_minibatch) in json.loads(printed.stdout).items():
        pairs, minibatch = AT_MOST[mode]
        assert per_pair <= pairs, mode
        assert per_minibatch <= minibatch, mode
