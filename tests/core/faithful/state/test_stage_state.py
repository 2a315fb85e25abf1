"""The state of modules as one value: captured, compared, swapped in, restored.

Here are also the tests of ``behavior``.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import together
from lightning_gpipe.core.faithful.state.behavior import Behavior
from lightning_gpipe.core.faithful.state.stage_state import ModuleState, StageState

TRAIN = bytes([True])  # the flags of one module


class Busy(nn.Module):
    """Changes everything that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))
        self.follower = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.steps = 0
        self.log: list[float] = []
        self.rng = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.follower.add_(1)
        self.steps += 1
        self.log.append(self.rng.random())
        return x * self.steps


X = torch.ones(2)


def state_of(module: Busy) -> Any:
    values = module.calls.item(), module.follower.tolist(), module.steps, list(module.log)
    return *values, module.rng.getstate()


def test_whole_state_is_restored() -> None:
    module = Busy()
    before = state_of(module)
    state = ModuleState.capture([module], parameters=True)

    module(X)
    state.restore()

    assert state_of(module) == before


def test_parameters_are_left_alone_unless_asked() -> None:
    module = Busy()
    state = ModuleState.capture([module])

    module(X)
    state.restore()

    assert module.calls == 0
    assert module.follower.tolist() == [1, 1]


def test_run_after_a_comparison_starts_from_the_same_and_leaves_nothing() -> None:
    module, behavior, journal = Busy(), Behavior(), Journal()
    stage = StageState([module], deferred=True)
    for _ in range(3):  # the first run records what changes
        before = state_of(module)
        state = stage.capture(behavior)
        module(X)
        state.compare(behavior)
        after = state_of(module)

        with together(state.swapped_in(journal)):
            started = state_of(module)
            module(X)
            again = state_of(module)

        assert started == before
        assert again == after
        assert state_of(module) == after


def test_copied_stage_has_the_state_of_the_copied_modules() -> None:
    module, behavior = Busy(), Behavior()
    stage = StageState([module], deferred=False)
    stage.capture(behavior).compare(behavior)

    twin, copied = copy.deepcopy((module, stage))
    state = copied.capture(Behavior())
    twin(X)
    state.restore()

    assert twin.steps == 0


def test_what_is_known_of_the_layers_is_bounded() -> None:
    """A batch with other keys in each step was remembered for ever."""
    state = StageState([nn.Tanh()], deferred=False)
    known = state.behavior(TRAIN, "structure 0")

    for k in range(1, 100):
        state.behavior(TRAIN, f"structure {k}")

    assert state.behavior(TRAIN, "structure 0") is not known


def test_what_is_used_is_not_forgotten() -> None:
    state = StageState([nn.Tanh()], deferred=False)
    known = state.behavior(TRAIN, "always")

    for k in range(300):
        state.behavior(TRAIN, f"structure {k}")
        assert state.behavior(TRAIN, "always") is known
