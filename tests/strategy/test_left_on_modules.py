"""Other processes get what a step leaves on modules, or the shape of what is large."""

import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpipe.core.data import tree_flatten, tree_unflatten
from lightning_gpipe.strategy.left_on_modules import LeftOnModules, follow

LARGE = 100_000


class Mode(Enum):
    TRAIN = "train"


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
    made.cache = dict.fromkeys(range(2_000), 0)
    made.counts = Counter(a=1)
    made.confusion = np.zeros((2, 2))
    made.pair = torch.zeros(1), torch.zeros(1)
    made.lazy = None
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
    x.counts["a"] += 1
    x.lazy = OrderedDict(a=[torch.ones(1)])


def assign(x: Any) -> None:
    x.count += 1
    x.inner.state = (1, "two", None, [torch.ones(3)])
    x.small = x.small + 1
    x.seen = [*x.seen, torch.zeros(2)]
    del x.by_name["val"]
    x.latest = deque([torch.ones(1)], maxlen=5)
    x.counts = Counter(b=2)
    x.lazy = defaultdict(list, {(1, Mode.TRAIN): [2]})
    x.names = {(1, "a"), Mode.TRAIN}


def edit(x: Any) -> None:
    x.small.add_(1.0)
    x.seen[0].mul_(3.0)
    x.seen.insert(0, torch.zeros(1))
    x.by_name["train"][0] = 7.0
    x.names.discard("a")
    x.nested[0].clear()
    x.long.clear()
    x.cache.pop(3)
    x.confusion[0, 1] += 1
    x.pair[1].add_(1.0)


NAMES = (
    *("count", "small", "seen", "by_name", "latest", "names", "nested", "long", "cache"),
    *("counts", "confusion", "pair", "lazy"),
)


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


def test_edits_of_inference_tensors() -> None:
    """They have no versions; a list of them, such as all outputs, is not told anew."""
    other: Any = module()
    with torch.inference_mode():
        first: Any = module()
        before = LeftOnModules({"": first})
        first.small += 1
    changes = list(before.changes())
    follow({"": other}, changes)

    assert other.small.tolist() == [1, 1]
    assert ("seen",) not in [change.keys for change in changes]


@pytest.mark.parametrize(
    "key", [int, len, nn.Linear(1, 1), object(), torch.zeros(1)], ids=lambda key: type(key).__name__
)
def test_keys_that_are_not_told(key: Any) -> None:
    def step(x: Any) -> None:
        x.by_name[key] = [1]
        x.by_name["train"].append(2.0)

    _, other = after(step)

    assert other.by_name == {"train": [1.0, 2.0], "val": []}


def test_arrays_of_other_classes_and_containers_within_themselves() -> None:
    def step(x: Any) -> None:
        x.seen.append(x.seen)
        x.other = np.ma.masked_array([1])
        x.by_name["train"] = x.by_name
        x.count = 1

    _, other = after(step)

    assert len(other.seen) == 1 and type(other.other) is object
    assert other.by_name == {"train": [1.0], "val": []} and other.count == 1


@pytest.mark.parametrize("there", [None, [1], {"a": 1}, torch.zeros(2), deque()])
def test_container_of_another_kind(there: Any) -> None:
    """The other process was not told of this one's."""
    new: Any
    for new in (defaultdict(object, x=object()), deque([object()])):
        first, other = module(), module()
        first.lazy, other.lazy = new, there
        before = LeftOnModules({"": first})
        new.clear()
        follow({"": other}, before.changes())


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


@pytest.mark.parametrize(
    "make, draw",
    [
        (lambda: torch.Generator().manual_seed(1), lambda x: float(torch.rand(3, generator=x)[2])),
        (lambda: random.Random(1), lambda x: x.random()),
        (lambda: np.random.default_rng(1), lambda x: x.random()),
        (lambda: np.random.RandomState(1), lambda x: x.random_sample()),
    ],
    ids=["torch", "random", "numpy", "older numpy"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_generator_that_a_step_draws_from(make: Any, draw: Any, inside: bool) -> None:
    """Hooks of other processes drew other numbers from theirs, such as for a learning rate."""
    first, other = nn.Module(), nn.Module()
    for each in (first, other):
        each.generators = {"own": make()} if inside else make()  # type: ignore[assignment]

    def generator(x: Any) -> Any:
        return x.generators["own"] if inside else x.generators

    before = LeftOnModules({"": first})
    draw(generator(first))
    sent = tree_flatten(list(before.changes()))
    kept = generator(other)
    follow({"": other}, tree_unflatten(pickle.loads(pickle.dumps(sent))))

    assert generator(other) is kept
    assert draw(generator(first)) == draw(kept)
    same = LeftOnModules({"": first})
    held = torch.Generator().get_state()  # where the state was that it looked at
    assert not list(same.changes())
    del held
