"""Gradients of a leaf that the graphs of several stages reach, whose threads run at once."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from lightning_gpipe.core.faithful import Behavior
from lightning_gpipe.core.faithful.shadow import Shadows
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.roots import now, root_of
from lightning_gpipe.core.run.backward.stage_backward import StageBackward

STAGES, ROUNDS, WIDTH = 2, 60, 512


@pytest.fixture
def _many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_many_switches")
def test_gradient_that_two_stages_add_to_at_once() -> None:
    """Each read the sum and wrote its own: that of one stage could be lost, silently."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    shadows = Shadows([layer], grad=True, device=torch.device("cpu"))
    [(_, leaf)] = shadows.pairs
    used_leaves = UsedLeaves([shadows])
    barrier = Barrier(STAGES, timeout=60)

    def stage() -> None:
        backward = StageBackward(used_leaves)
        for _ in range(ROUNDS):
            kept = leaf * 2  # what a layer keeps, for later micro-batches too
            since = now()
            outputs = [kept * 3]
            backward.record(Behavior(), [], outputs, since)
            barrier.wait()
            backward.run(0, [], [root_of(outputs[0])], [torch.ones(WIDTH, WIDTH)])

    with ThreadPoolExecutor(STAGES) as threads:
        for each in [threads.submit(stage) for _ in range(STAGES)]:
            each.result(timeout=60)

    [(_, gradient)] = shadows.take_gradients()
    torch.testing.assert_close(gradient, torch.full((WIDTH, WIDTH), 6.0 * ROUNDS * STAGES))
