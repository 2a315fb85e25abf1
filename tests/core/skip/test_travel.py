"""Promise: a skip goes the straight way, once there and once back, and nobody keeps it longer.

A stage between knows nothing of it. A stage that stashed lets its tensor go when it is sent, and
one that popped when its backward is done; what fails on the way stops all, and leaves nothing.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.data.pytree import FlatTree
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.skip.declare import in_flight
from lightning_gpipe.core.transport.copies import Copies, Parcel
from tests.support.faults import Fuse, OwnError, throw
from tests.support.lightning_modules import WIDTH, Classifier, Data, trainer
from tests.support.meters import census
from tests.support.models import assert_same, assert_same_step, perceptron, rows, step
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.skip_layers import Pop, Stash, added, itself, pair
from tests.support.waiting import awaited

WIDE = 50  # a skip is so much wider than what goes from layer to layer


# What is sent.


class Letter:
    """What was sent where, and how many bytes its tensors have."""

    def __init__(self, to: Action, value: FlatTree, skip: Route | None) -> None:
        self.to = to
        self.way = None if skip is None else (skip.source, skip.target)
        self.bytes = sum(leaf.nbytes for leaf in value.leaves if isinstance(leaf, Tensor))


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> list[Letter]:
    found: list[Letter] = []
    pack = Copies.pack

    def noted(self: Copies, to: Action, value: FlatTree, skip: Route | None) -> Parcel:
        found.append(Letter(to, value, skip))
        return pack(self, to, value, skip)

    monkeypatch.setattr(Copies, "pack", noted)
    return found


def wide(x: Tensor) -> Tensor:
    return x.repeat(1, WIDE)


def narrow(x: Tensor, skip: Tensor) -> Tensor:
    return x + skip.unflatten(1, (WIDE, -1)).sum(1)


def with_wide_skip(depth: int) -> nn.Sequential:
    """A skip from the first to the last of so many layers."""
    stash, pop = pair(wide, narrow)
    first, *between = perceptron(depth)
    return nn.Sequential(nn.Sequential(first, stash), *between[:-1], pop)


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("stages", [2, 3, 6])
def test_skip_is_sent_once_and_its_gradient_once(
    stages: int, letters: list[Letter], pipe: Pipe
) -> None:
    m, last = 3, stages - 1
    pipeline = pipe(with_wide_skip(stages), stages=stages, copy=False)

    pipeline(rows(2 * m)).sum().backward()

    one = 2 * 3 * 8  # bytes of a micro-batch between two layers
    there = {(Action(Kind.FORWARD, i, last), (0, last), WIDE * one) for i in range(m)}
    back = {(Action(Kind.BACKWARD, i, 0), (0, last), WIDE * one) for i in range(m)}
    skips = [(each.to, each.way, each.bytes) for each in letters if each.way]
    assert len(skips) == 2 * m
    assert set(skips) == there | back
    # All else is as without: from the caller, from stage to stage, to the caller, and back again.
    assert [each.bytes for each in letters if not each.way] == [one] * 2 * m * (stages + 1)


def test_skip_within_a_stage_is_not_sent(letters: list[Letter], pipe: Pipe) -> None:
    pipeline = pipe(with_wide_skip(6), stages=1, copy=False)

    pipeline(rows(6)).sum().backward()

    assert all(each.way is None and each.bytes <= 2 * 3 * 8 for each in letters)


def test_skip_on_virtual_stages_of_one_device_is_not_sent_between(
    letters: list[Letter], pipe: Pipe
) -> None:
    pipeline = pipe(with_wide_skip(4), stages=4, devices=2, copy=False)

    pipeline(rows(6)).sum().backward()

    assert {each.to.j for each in letters if each.way} == {0, 3}
    assert {each.bytes for each in letters if not each.way} == {2 * 3 * 8}


@pytest.mark.parametrize("of, sent", [(lambda x: None, 0), (lambda x: wide(x).detach(), WIDE)])
def test_skip_without_a_gradient_has_none_sent_back(
    of: Callable[[Tensor], Tensor | None], sent: int, letters: list[Letter], pipe: Pipe
) -> None:
    module = with_wide_skip(3)
    first, pop = module[0], module[-1]
    assert isinstance(first, nn.Sequential) and isinstance(first[1], Stash) and isinstance(pop, Pop)
    first[1].of = of
    pop.join = lambda x, skip: x if skip is None else narrow(x, skip)

    pipe(module, stages=3, chunks=1, copy=False)(rows(2)).sum().backward()

    skips = {each.to.kind: each.bytes for each in letters if each.way}
    assert skips == {Kind.FORWARD: sent * 2 * 3 * 8, Kind.BACKWARD: 0}


# How long it is kept.


class Watched:
    """Functions to stash and pop by, and what memory they saw, in the order that they saw it."""

    def __init__(self) -> None:
        self.stashed: list[weakref.ref[Any]] = []
        self.popped: list[weakref.ref[Any]] = []
        self.at_the_end: list[int] = []

    def of(self, x: Tensor) -> Tensor:
        skip = x * 2  # which autograd does not save
        if skip.requires_grad:
            skip.register_hook(self._note_backward)
        self.stashed.append(weakref.ref(skip.untyped_storage()))
        return skip

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        self.popped.append(weakref.ref(skip.untyped_storage()))
        return x * skip  # which autograd saves

    def _note_backward(self, gradient: Tensor) -> None:
        self.at_the_end.append(alive(self.popped))


def alive(storages: list[weakref.ref[Any]]) -> int:
    return sum(each() is not None for each in storages)


def settled(storages: list[weakref.ref[Any]]) -> int:
    """What is alive, once workers let go of their last job, which is after they tell its end."""
    return awaited(lambda: alive(storages), 0)


@pytest.fixture
def _copied_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors arrive in memory of their own, as between devices."""

    def pack(self: Copies, to: Action, value: FlatTree, skip: Route | None) -> Parcel:
        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)

        return FlatTree(list(map(copied, value.leaves)), value.spec), None

    monkeypatch.setattr(Copies, "pack", pack)


def watched_module(watched: Watched) -> nn.Sequential:
    stash, pop = pair(watched.of, watched.join)
    first, tanh, *_ = perceptron(2)
    return nn.Sequential(first, stash, tanh, pop)


@pytest.mark.usefixtures("no_collector", "_copied_on_the_way")
@with_and_without_threads
@every_mode
@pytest.mark.parametrize("grad", [True, False])
def test_freed_where_it_was_stashed_once_it_is_sent(grad: bool, pipe: Pipe) -> None:
    watched = Watched()
    pipeline = pipe(watched_module(watched), [2, 1, 1], copy=False)
    pipeline(rows(6)).sum().backward()  # in its first run a stage works on copies of its inputs
    watched.stashed.clear()
    watched.popped.clear()

    with torch.set_grad_enabled(grad):
        y = pipeline(rows(6))

    assert len(watched.stashed) == len(watched.popped) == 3
    assert settled(watched.stashed) == 0
    # Where it was popped it is saved for backward, or kept for the recomputation.
    assert alive(watched.popped) == (3 if grad else 0)
    if grad:
        y.sum().backward()
    assert settled([*watched.stashed, *watched.popped]) == 0


@pytest.mark.usefixtures("no_collector")
@every_mode
def test_freed_where_it_was_popped_once_its_backward_is_done(pipe: Pipe) -> None:
    watched = Watched()
    pipeline = pipe(watched_module(watched), [2, 1, 1], threads=False, chunks=1, copy=False)
    pipeline(rows(6)).sum().backward()  # works on a copy of its input
    y = pipeline(rows(6))
    y.sum().backward()

    assert watched.at_the_end == [0, 0]
    assert alive(watched.popped) == 0
    assert y.grad_fn is not None


def use(pipeline: GPipe, *, backward: bool) -> None:
    with torch.no_grad():
        pipeline(rows(5))
    y = pipeline(rows(5))
    if backward:
        y.sum().backward()


@pytest.mark.parametrize("mode, threads", [("always", True), ("never", False)])
def test_no_growth(pipe: Pipe) -> None:
    (a, d), (b, c) = pair(), pair(torch.tanh, torch.mul)
    module = nn.Sequential(*perceptron(1), a, b, *perceptron(2), Fuse(), c, d)
    pipeline = pipe(module, stages=4, copy=False)
    fuse = pipeline[5]
    assert isinstance(fuse, Fuse)
    before = census()

    for k in range(50):
        if k % 5 == 3:
            fuse.light((("forward", "backward")[k % 2], 1), throw(OwnError()))
        with suppress(OwnError):
            use(pipeline, backward=k % 5 != 4)
        pipeline.zero_grad()

    assert awaited(census, before) == before
    assert not in_flight()


# What fails.


def fused() -> nn.Sequential:
    """A skip from stage 0 to stage 2, and fuses before its stash and after its pop."""
    stash, pop = pair(torch.tanh, torch.mul)
    first, tanh = perceptron(2)
    return nn.Sequential(nn.Sequential(first, Fuse(), stash), tanh, nn.Sequential(pop, Fuse()))


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("where", ["0.1", "2.1"])
def test_error_in_a_stage_that_has_a_skip_to_send(where: str, kind: str, pipe: Pipe) -> None:
    module, plain = fused(), fused()
    plain.load_state_dict(module.state_dict())
    pipeline = pipe(module, stages=3, copy=False)
    fuse = pipeline.get_submodule(where)
    assert isinstance(fuse, Fuse)

    for at in range(3):
        fuse.light((kind, at), throw(OwnError("mine")))
        with pytest.raises(OwnError, match="mine") as error:
            step(pipeline, rows(7))
        assert f"on stage {where[0]}" in error.value.__notes__[0]
        assert not in_flight()
        pipeline.zero_grad()

    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
def test_error_of_the_functions_of_a_skip(pipe: Pipe) -> None:
    stash, pop = Stash(), Pop()
    pipeline = pipe(nn.Sequential(stash, *perceptron(2), pop), [1, 2, 1], copy=False)
    fault = throw(OwnError("mine"))

    stash.of = lambda x: fault()
    with pytest.raises(OwnError, match="mine"):
        pipeline(rows(6))
    stash.of, pop.join = itself, lambda x, skip: fault()
    with pytest.raises(OwnError, match="mine"):
        pipeline(rows(6))

    pop.join = added
    x = rows(6)
    assert_same(pipeline(x), x + pipeline[2](pipeline[1](x)))


def test_strategy_refuses_a_stash_without_a_pop(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(6, WIDTH), Stash(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    with pytest.raises(
        TypeError, match=r"'skip' is stashed by layer 1 \(Stash, stage 0\) and never"
    ):
        trainer(tmp_path, GPipeStrategy(balance=[2, 2]), devices=2).fit(
            Classifier(layers=layers), Data()
        )
