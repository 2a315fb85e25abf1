"""What holds for every test: no orders from outside, its share of the cores, drawn cases."""

import logging
import os
import re

from hypothesis import HealthCheck, Phase, settings

# What a shell, a CI or a scheduler sets for its own ends is an order to what is tested: a cluster
# to join, defaults of the Trainer, a seed, a terminal to fill and to colour.
_ORDERS = re.compile(
    r"SLURM_|LSB_|PL_|TORCHELASTIC_|KUBERNETES_|TTY_|PYTHONWARNINGS$|MASTER_(ADDR|PORT)$"
    r"|((LOCAL_)?WORLD_SIZE|((LOCAL|GROUP|NODE)_)?RANK)$|(FORCE_COLOR|NO_COLOR|LINES)$"
)


def forget_orders() -> None:
    for name in filter(_ORDERS.match, [*os.environ]):
        del os.environ[name]


forget_orders()
os.environ["COLUMNS"] = "80"

# Before torch is imported, which reads these once. Tests run beside one another, a process for each
# core, and threads that wait for work in a loop would starve the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The fixtures that all tests may take. Simulated GPUs come before torch, which the others import.
pytest_plugins = [
    "tests.support.device_memory",
    "tests.support.pipes",
    "tests.support.process",
    "tests.support.ranks",
    "tests.support.sampling",
]
if "SIMULATED_GPUS" in os.environ:
    pytest_plugins.insert(0, "tests.simcuda.plugin")

# Cases are not made smaller in the suite: that takes longer than a test may. Half of them are drawn
# where others are sampled, too.
settings.register_profile(
    "suite",
    max_examples=30 if "SAMPLED_CASES" in os.environ else 60,
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_runtest_setup() -> None:
    """Let caplog see what Lightning says: it asks at its import whether anybody does.

    Its launchers leave orders, by which the next Trainer would wait for a process of others.
    """
    forget_orders()
    logging.getLogger("lightning.pytorch").propagate = True
