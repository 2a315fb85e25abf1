"""Cost: the number of calls that the strategy adds to a step, the same on every machine.

Lightning and the strategy ask one another for the same things in every step: where the batch goes,
which optimizer there is, how many steps there were. What cannot change between two steps is found
at setup, so that the pipeline itself is all that a step costs.
"""

from __future__ import annotations

import json
import subprocess
import sys

# Calls of functions of the package, of Lightning, and of nn.Module, beside those of the same
# pipeline as a module of plain Lightning. Counted: 28; steps are watched, and logs are guarded.
AT_MOST = 31


def test_calls_of_a_step_beside_those_of_its_pipeline() -> None:
    command = [sys.executable, "-m", "tests.support.trainer_calls"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)

    counted = json.loads(printed.stdout)

    assert counted["plain"] < counted["pipeline"], "a pipeline ran, and was counted"
    assert counted["strategy"] - counted["pipeline"] <= AT_MOST
