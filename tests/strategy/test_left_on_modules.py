"""Other processes get what a step leaves on modules, or the shape of what is large."""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpipe.core.data import tree_flatten, tree_unflatten
from lightning_gpipe.strategy.left_on_modules import LeftOnModules, follow

LARGE = 100_000


def module() -> nn.Module:
    made: Any = nn.Module()
    made.inner = nn.Linear(1, 1)
    made.count = 0
    made.small = torch.zeros(2)
    made.large = torch.zeros(LARGE)
    made.seen = [torch.ones(())]
    made.by_name = defaultdict(list, train=[1.0], val=[])
    made.latest = deque([1, 2], maxlen=2)
    made.names = {"a"}
    made.nested = ([{"mean": torch.zeros(2)}],)
    made.long = list(range(2_000))
    made.other = object()
    return made


def after(step: Callable[[Any], object], here: Callable[[Any], object] = id) -> tuple[Any, Any]:
    """A module after a step, and that of a process that did only what is done ``here``."""
    first, other = module(), module()
    before = LeftOnModules(dict(first.named_modules()))
    step(first)
    here(other)
    sent = tree_flatten(list(before.changes()))
    follow(dict(other.named_modules()), tree_unflatten(pickle.loads(pickle.dumps(sent))))
    return first, other


def append(x: Any) -> None:
    x.seen.append(torch.full((3,), 2.0, requires_grad=True))
    x.by_name["train"].append(2.0)
    x.by_name["test"].append(np.arange(3))
    x.latest.append(3)
    x.names.add("b")
    x.nested[0][0]["mean"].add_(1.0)
    x.long.append(2_000)


def assign(x: Any) -> None:
    x.count += 1
    x.inner.state = (1, "two", None, [torch.ones(3)])
    x.small = x.small + 1
    x.seen = [*x.seen, torch.zeros(2)]
    del x.by_name["val"]
    x.latest = deque([torch.ones(1)], maxlen=5)


def edit(x: Any) -> None:
    x.small.add_(1.0)
    x.seen[0].mul_(3.0)
    x.seen.insert(0, torch.zeros(1))
    x.by_name["train"][0] = 7.0
    x.names.discard("a")
    x.nested[0].clear()
    x.long.clear()


NAMES = "count", "small", "seen", "by_name", "latest", "names", "nested", "long"


@pytest.mark.parametrize("step", [append, assign, edit])
def test_values(step: Callable[[Any], object]) -> None:
    first, other = after(step)

    for name in NAMES:
        assert plain(getattr(other, name)) == plain(getattr(first, name)), name
        assert type(getattr(other, name)) is type(getattr(first, name))
    assert vars(other.inner).keys() == vars(first.inner).keys()
    assert not any(x.requires_grad for x in other.seen)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple | deque):
        return list(map(plain, value))
    return {key: plain(x) for key, x in value.items()} if isinstance(value, dict) else value


def test_nothing_changed() -> None:
    before = LeftOnModules({"": module()})

    assert not list(before.changes())


def test_large_tensors() -> None:
    """One that this process has not is on ``meta``; one that it has computed, too, stays."""

    def step(x: Any) -> None:
        x.seen.append(torch.ones(LARGE))
        x.large.add_(1.0)

    first, other = after(step)
    assert other.seen[1].is_meta and other.large.is_meta
    assert other.seen[1].shape == (LARGE,)
    assert other.seen[0] == first.seen[0]

    _, other = after(step, here=step)
    assert not other.seen[1].is_meta and other.large.sum() == LARGE

    _, other = after(step, here=lambda x: x.large.sub_(1.0))
    assert other.large.is_meta


def test_objects_that_are_not_told() -> None:
    def step(x: Any) -> None:
        x.other = object()
        x.seen.append(object())
        x.by_name[3] = object()
        x.by_name["val"] = [5]

    first, other = after(step)

    assert other.other is not first.other
    assert len(other.seen) == 1
    assert other.by_name == {"train": [1.0], "val": [5]}


def test_container_that_is_not_there() -> None:
    """One in an object of which this process was not told is left out."""
    first: Any = module()
    first.more = {"new": [object(), []]}
    before = LeftOnModules({"": first})
    first.more["new"][1].append(1)
    other: Any = module()

    for other.more in ({}, {"new": 1}):
        follow({"": other}, before.changes())
        assert other.more in ({}, {"new": 1})
