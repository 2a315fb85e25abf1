from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data.pytree import FlatTree
from lightning_gpipe.core.faithful.random import reproducible as module_under_test
from lightning_gpipe.core.faithful.random.generators import SharedGenerators
from lightning_gpipe.core.faithful.random.reproducible import RandomDraws
from lightning_gpipe.core.faithful.state import behavior
from lightning_gpipe.core.faithful.state.behavior import Behavior
from lightning_gpipe.core.faithful.state.stage_state import ModuleState, StageState

CPU = torch.device("cpu")
TRAIN, EVAL = bytes([True]), bytes([False])


class Forward:
    """A forward that may draw, and remembers how it was run."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.private: list[bool] = []

    def __call__(self, shared: SharedGenerators | None) -> list[FlatTree]:
        self.private.append(shared is not None)
        if not self.draws:
            return [FlatTree([0.0])]
        if shared is None:
            return [FlatTree([torch.rand(()).item()])]
        with shared.private(0).drawing(0):
            return [FlatTree([torch.rand(()).item()])]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> RandomDraws:
    monkeypatch.setattr(module_under_test, "_ASSUMED", None)
    return RandomDraws([CPU, CPU])


def nothing(first: bool) -> Iterator[ModuleState]:
    return iter(())


def state() -> Tensor:
    return torch.default_generator.get_state()


def run(
    draws: RandomDraws,
    forward: Callable[[SharedGenerators | None], list[FlatTree]],
    flags: bytes = TRAIN,
    *,
    snapshots: Callable[[bool], Iterable[ModuleState]] | None = nothing,
    modes: bool = False,
    recomputed: bool = False,
) -> None:
    draws.run(
        flags,
        forward,
        generators=SharedGenerators(draws.shared),
        snapshots=snapshots,
        modes=modes,
        recomputed=recomputed,
    )


def test_what_never_draws_has_private_generators_once(draws: RandomDraws) -> None:
    forward, before = Forward(draws=False), state()

    for _ in range(3):
        run(draws, forward)

    assert forward.private == [True, False, False]
    assert torch.equal(state(), before)


def test_what_draws_is_run_once_each_time(draws: RandomDraws) -> None:
    forward = Forward(draws=True)

    for _ in range(3):
        before = state()
        run(draws, forward)
        assert not torch.equal(state(), before), "the next mini-batch has other numbers"

    assert forward.private == [True, True, True]


def test_training_modes_are_told_apart(draws: RandomDraws) -> None:
    run(draws, Forward(draws=False), EVAL)
    forward = Forward(draws=True)

    run(draws, forward, TRAIN)
    run(draws, forward, TRAIN)

    assert forward.private == [True, True]


def test_what_draws_later_for_the_first_time_is_run_again(draws: RandomDraws) -> None:
    forward = Forward(draws=False)
    run(draws, forward)
    forward.draws = True

    run(draws, forward)
    run(draws, forward)

    assert forward.private == [True, False, True, True]


class Moves(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(size))


def test_buffers_are_put_back_before_it_runs_again(draws: RandomDraws) -> None:
    module = Moves(1)
    forward = Forward(draws=False)
    run(draws, forward)
    seen: list[float] = []

    def late(shared: SharedGenerators | None) -> list[FlatTree]:
        seen.append(module.calls.item())
        module.calls.add_(1)
        return Forward(draws=True)(shared)

    run(draws, late, snapshots=lambda first: [ModuleState.capture([module])])

    assert seen == [0, 0]


def test_large_buffer_that_cannot_be_put_back(draws: RandomDraws) -> None:
    module, unedited = Moves(2**19), Behavior()
    state, unedited.edited_buffers = StageState([module], deferred=False), set()
    run(draws, Forward(draws=False))

    def late(shared: SharedGenerators | None) -> list[FlatTree]:
        module.calls.add_(1)
        return Forward(draws=True)(shared)

    with pytest.raises(RuntimeError, match="Moves must edit its buffer 'calls' in every forward"):
        run(draws, late, snapshots=lambda first: [state.capture(unedited)])


def test_what_will_not_be_recomputed_is_not_run_again(draws: RandomDraws) -> None:
    forward = Forward(draws=False)
    run(draws, forward, snapshots=None)
    forward.draws = True

    for _ in range(2):
        run(draws, forward, snapshots=None)

    assert forward.private == [True, False, True]


def test_lone_worker_has_its_generators_to_itself() -> None:
    forward = Forward(draws=True)

    run(RandomDraws([CPU]), forward)

    assert forward.private == [False]


def test_under_modes_of_the_caller_nothing_is_run_twice(draws: RandomDraws) -> None:
    forward = Forward(draws=False)
    run(draws, forward)
    forward.draws = True

    run(draws, forward, modes=True)

    assert forward.private == [True, True]


def test_what_was_learnt_can_be_forgotten(draws: RandomDraws) -> None:
    with draws.unchanged():
        run(draws, Forward(draws=False))
    forward = Forward(draws=True)

    run(draws, forward)

    assert forward.private == [True]


def test_what_is_known_is_bounded(draws: RandomDraws) -> None:
    for k in range(300):
        run(draws, Forward(draws=False), bytes(map(int, f"{k:09b}")))

    assert len(draws._history) < 100


def test_what_draws_only_at_first_loses_its_private_generators(draws: RandomDraws) -> None:
    """An initialisation that draws once made every later mini-batch slow."""
    forward = Forward(draws=True)
    run(draws, forward)
    forward.draws = False

    for _ in range(3):
        run(draws, forward)

    assert forward.private == [True, True, False, False]


def test_what_drew_twice_keeps_them(draws: RandomDraws) -> None:
    forward = Forward(draws=True)
    run(draws, forward)
    run(draws, forward)
    forward.draws = False

    run(draws, forward)
    run(draws, forward)

    assert forward.private == [True] * 4


@pytest.mark.parametrize("assumed", [None, module_under_test._Frequency.NEVER])
def test_all_buffers_are_saved_where_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, assumed: Any
) -> None:
    """Where a model is assumed to draw nothing at first, as on torch 2.8, it may all the same."""
    monkeypatch.setattr(module_under_test, "_ASSUMED", assumed)
    asked: list[bool] = []

    def snapshots(first: bool) -> Iterator[ModuleState]:
        asked.append(first)
        return iter(())

    draws = RandomDraws([CPU, CPU])
    for _ in range(2):
        run(draws, Forward(draws=False), snapshots=snapshots)

    assert asked == ([False] if assumed is None else [True, False])


# Backward.


def strays(amount: int = 5) -> Callable[[SharedGenerators | None], None]:
    """A backward that draws from the shared generator itself, as an untagged operator does."""

    def backward(shared: SharedGenerators | None) -> None:
        torch.rand(amount)

    return backward


def back(draws: RandomDraws, backward: Callable[[SharedGenerators | None], None]) -> None:
    generators = SharedGenerators(draws.shared)
    draws.run_once("backward", TRAIN, backward, generators=generators, modes=False)


def expected_after_one_draw() -> Tensor:
    """The state of the shared generator after one draw, which is undone."""
    before = state()
    generators = SharedGenerators([CPU])
    generators.advance()
    after = state()
    torch.default_generator.set_state(before)
    return after


def test_generator_advances_by_one_draw_however_much_backward_drew(draws: RandomDraws) -> None:
    after = expected_after_one_draw()

    with pytest.warns(UserWarning, match="must draw random numbers by PyTorch's operators"):
        back(draws, strays())

    assert torch.equal(state(), after)


def test_generator_advances_by_one_draw_however_much_forward_strayed(draws: RandomDraws) -> None:
    after = expected_after_one_draw()

    with pytest.warns(UserWarning, match="must draw random numbers by PyTorch's operators"):
        run(draws, lambda shared: [FlatTree([torch.rand(5)])])

    assert torch.equal(state(), after)


def test_generator_is_rewound_after_a_backward_that_failed(draws: RandomDraws) -> None:
    before = state()

    def fail(shared: SharedGenerators | None) -> None:
        torch.rand(5)
        raise KeyError

    with pytest.raises(KeyError):
        back(draws, fail)

    assert torch.equal(state(), before)


def test_backward_that_draws_nothing_runs_bare_from_then_on(draws: RandomDraws) -> None:
    private: list[bool] = []

    for _ in range(3):
        back(draws, lambda shared: private.append(shared is not None))

    assert private == [True, False, False]


# What is not recorded.


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_recorded_in_a_block(draws: RandomDraws, fails: bool) -> None:
    forward = Forward(draws=False)
    run(draws, forward)  # runs bare from now on

    try:
        with draws.unchanged():
            forward.draws = True
            run(draws, forward)
            run(draws, forward)
            if fails:
                raise KeyError
    except KeyError:
        pass
    forward.draws = False
    run(draws, forward)

    # In the block: bare, again with private generators, and with them. After it: bare.
    assert forward.private == [True, False, True, True, False]


def test_training_mode_that_was_used_last_is_dropped_last(
    draws: RandomDraws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behavior, "_CAPACITY", 2)
    forward = Forward(draws=False)
    first, second, third = map(bytes, ((1, 1), (1, 0), (0, 0)))
    for flags in (first, second, first, third):  # the second was used least recently
        run(draws, forward, flags)
    forward.private.clear()

    run(draws, forward, first)

    assert forward.private == [False]
