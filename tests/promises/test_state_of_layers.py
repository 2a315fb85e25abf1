"""Transparency: state that layers advance in forward, besides parameters and buffers.

Each micro-batch advances it once. A pipeline is therefore compared with the plain module run on one
micro-batch after another: the same gradients, and the same state afterwards.

Here are also the tests of ``attributes`` and ``contents``.
"""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import is_recomputing
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Counter, a_loss, assert_same, gradients, perceptron, rows
from tests.support.pipes import RECOMPUTED, M, Pipe, every_mode, with_and_without_threads

pytestmark = [every_mode, with_and_without_threads]


def around(layer: nn.Module) -> nn.Sequential:
    """The layer in the first of two stages, between layers with parameters."""
    return nn.Sequential(perceptron(2), layer, *perceptron(2)).double()


def assert_same_in_micro_batches(pipe: Pipe, plain: nn.Sequential, steps: int = 3) -> GPipe:
    """Steps give the gradients of steps of ``plain`` on one micro-batch after another.

    Returns:
        The pipeline.
    """
    pipeline = pipe(plain, [2, len(plain) - 2])
    for seed in range(steps):
        x = rows(7, seed=seed).detach()
        plain.zero_grad()
        pipeline.zero_grad()
        a_loss(torch.cat([plain(each) for each in x.tensor_split(M)])).backward()
        a_loss(pipeline(x)).backward()
        assert_same(gradients(pipeline), gradients(plain))
    return pipeline


class Previous(nn.Module):
    """Adds the mean of the previous micro-batch; makes the attribute when it first runs."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + getattr(self, "previous", 0)
        self.previous = x.detach().mean()
        return y


class Grows(nn.Module):
    """Has a container that grows with every call."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.seen, dict):
            self.seen[len(self.seen)] = x.shape
        elif isinstance(self.seen, set):
            self.seen.add(len(self.seen))
        else:
            self.seen.append(len(self.seen))
        return x * len(self.seen)


class Nested(nn.Module):
    """Has a list in a dict in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[dict[str, list[int]], int] = ({"calls": [0]}, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.state[0]["calls"][0] += 1
        return x * self.state[0]["calls"][0]


class Meter:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: float) -> float:
        self.total += value
        self.values.append(value)
        return self.total + len(self.values)


class Metered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.meter.update(float(x.detach().abs().mean()))


class Average(nn.Module):
    """Keeps a moving average in a tensor that is no buffer, or in a list of such."""

    def __init__(self, *, listed: bool, data: bool, size: int = 3) -> None:
        super().__init__()
        mean = torch.ones(size, dtype=torch.float64)
        self.mean: Any = [mean] if listed else mean
        self.data = data

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean[0] if isinstance(self.mean, list) else self.mean
        y = x * mean[:3].clone()
        (mean.data if self.data else mean).mul_(0.5).add_(x.detach().mean())
        return y


class Histogram(nn.Module):
    """Counts in a NumPy array."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.counts = np.zeros(size)

    def forward(self, x: Tensor) -> Tensor:
        self.counts[: len(x)] += 1
        return x * float(self.counts.sum())


LAYERS = {
    "a counter": Counter(),
    "an attribute that does not exist at first": Previous(),
    "a list": Grows([]),
    "a large list": Grows([0] * 1000),
    "a dict": Grows({}),
    "a set": Grows(set()),
    "a deque": Grows(deque()),
    "containers in containers": Nested(),
    "an object": Metered(),
    "a tensor": Average(listed=False, data=False),
    "a tensor edited through .data": Average(listed=False, data=True),
    "a list of tensors": Average(listed=True, data=False),
    "a NumPy array": Histogram(5),
    "a large NumPy array": Histogram(500),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_attributes(layer: nn.Module, pipe: Pipe) -> None:
    """Once a recomputation started from what the last forward left, and moved it on again."""
    plain = around(deepcopy(layer))

    pipeline = assert_same_in_micro_batches(pipe, plain)

    assert_same(_state(pipeline[1]), _state(plain[1]))


def _state(layer: nn.Module) -> dict[str, Any]:
    state = {name: each for name, each in vars(layer).items() if name not in vars(nn.Module())}
    state.update(vars(state.pop("meter", None) or Meter()))
    return {name: each.tolist() if name == "counts" else each for name, each in state.items()}


class Lazy(nn.Module):
    """Makes what it keeps when it first runs, or anew when ``fresh`` calls have changed it."""

    def __init__(self, make: Callable[[], Any], fresh: int | None = None) -> None:
        super().__init__()
        self.make, self.fresh = make, fresh
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.fresh == _calls_of(self.kept):
            self.kept = self.make()
        kept = self.kept
        if isinstance(kept, list):
            kept.append(1.0)
        elif isinstance(kept, Tensor):
            kept += 1
        else:
            kept.update(1.0)
        return x * (1 + _calls_of(kept))


def _calls_of(kept: Any) -> float:
    return float(kept) if isinstance(kept, Tensor) else len(getattr(kept, "values", kept))


def one_number() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


KEPT = {"a list": list, "an object": Meter, "a tensor": one_number}


@pytest.mark.parametrize("fresh", [None, 2])
@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_what_a_layer_makes_when_it_first_runs(
    make: Callable[[], Any], fresh: int | None, pipe: Pipe
) -> None:
    """Once a recomputation counted on in what it found, which nobody had looked at before."""
    plain = around(Lazy(make, fresh))

    pipeline = assert_same_in_micro_batches(pipe, plain)

    assert _calls_of(pipeline[1].kept) == _calls_of(plain[1].kept)


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_object_that_a_layer_gets_later(make: Callable[[], Any], pipe: Pipe) -> None:
    """Once what had been there was restored, and not the other one."""
    plain = around(Lazy(make))
    pipeline = pipe(plain, [2, 2])
    for seed in range(4):
        x = rows(7, seed=seed).detach()
        for module in (plain, pipeline):
            module.zero_grad()
            if seed == 2:
                module[1].kept = make()
        a_loss(torch.cat([plain(each) for each in x.tensor_split(M)])).backward()
        a_loss(pipeline(x)).backward()
        assert_same(gradients(pipeline), gradients(plain))


class Sometimes(nn.Module):
    """Changes what it uses in some of the calls, before which there are others."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.listed, self.gate = listed, 1.0
        self.seen = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        y = x * (sum(self.seen) if self.listed else self.gate)
        if x.detach()[0, 0] > 0:
            self.gate += 1.0
            self.seen.append(self.gate)
        return y


@pytest.mark.parametrize("listed", [False, True])
def test_attribute_that_a_later_micro_batch_changes(pipe: Pipe, listed: bool) -> None:
    """Once the recomputation of one that had not changed it read what a later one had left."""
    plain = nn.Sequential(Sometimes(listed=listed), *perceptron(2)).double()
    pipeline = pipe(plain, [2, 1])
    for _ in range(3):
        x = rows(7).detach().abs()
        x[: len(x.tensor_split(M)[0])] *= -1
        for module in (plain, pipeline):
            module.zero_grad()
        inputs = [each.requires_grad_() for each in (x.clone(), x.clone())]
        a_loss(torch.cat([plain(each) for each in inputs[0].tensor_split(M)])).backward()
        a_loss(pipeline(inputs[1])).backward()
        assert_same(inputs[1].grad, inputs[0].grad)
        assert_same(gradients(pipeline), gradients(plain))


class Vocabulary(nn.Module):
    """Holds what later runs must not look through again."""

    def __init__(self) -> None:
        super().__init__()
        self.words: Any = Counted(range(2000))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Counted(list[Any]):
    """A list that counts how often somebody goes through it."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def test_very_large_containers_that_do_not_change(pipe: Pipe) -> None:
    """A vocabulary of 300 000 words once took seconds per mini-batch."""
    layer = Vocabulary()
    pipeline = pipe(around(layer), [2, 2], copy=False)
    for _ in range(2):
        pipeline(rows(7)).sum().backward()
    walks = layer.words.walks

    for _ in range(3):
        pipeline(rows(7)).sum().backward()

    assert layer.words.walks == walks


class LateVocabulary(nn.Module):
    """Adds words to a large list, at last."""

    def __init__(self) -> None:
        super().__init__()
        self.words = list(range(100))
        self.adds = False

    def forward(self, x: Tensor) -> Tensor:
        if self.adds:
            self.words.append(len(self.words))
        return x * len(self.words)


def test_large_container_that_changes_for_the_first_time_later(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    layer = LateVocabulary()
    pipeline = pipe(around(layer), [2, 2], copy=False)
    pipeline(rows(7)).sum().backward()

    layer.adds = True
    if mode == "never":
        pipeline(rows(7)).sum().backward()
        assert len(layer.words) == 100 + M
    else:
        with pytest.raises(RuntimeError, match="must change what its attribute 'words' contains"):
            pipeline(rows(7))


class Refers(nn.Module):
    """Refers to an object that is deleted later."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = weakref.proxy(meter)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_proxy_of_a_deleted_object(pipe: Pipe) -> None:
    """Whoever asks for its class gets an error."""
    meter = Meter()
    pipeline = pipe(around(Refers(meter)), [2, 2], copy=False)
    del meter

    assert pipeline(rows(7)).shape == (7, 3)


class Drawing(nn.Module):
    """Drops with a mask from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator
        if generator is None:
            return x
        if isinstance(generator, (list, dict)):
            generator = generator[0]
        if isinstance(generator, torch.Generator):
            return x * torch.rand(x.shape, generator=generator, dtype=x.dtype)
        return x * generator.random()


GENERATORS = {
    "PyTorch's": lambda: torch.Generator().manual_seed(3),
    "in a list": lambda: [torch.Generator().manual_seed(3)],
    "in a dict": lambda: {0: torch.Generator().manual_seed(3)},
    "NumPy's": lambda: np.random.default_rng(3),
    "NumPy's older": lambda: np.random.RandomState(3),
    "Python's": lambda: random.Random(3),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_layers(kind: str, pipe: Pipe) -> None:
    """Once a recomputation drew other numbers: a gradient sum of 5.88 instead of 1.36."""
    assert_same_in_micro_batches(pipe, around(Drawing(GENERATORS[kind]())))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("at_first", ["none", "another"])
def test_generator_that_a_layer_gets_later(kind: str, at_first: str, pipe: Pipe) -> None:
    """Once forward drew from the one that was set, and a recomputation went on drawing from it."""
    make = GENERATORS[kind]
    plain = around(Drawing(make() if at_first == "another" else None))
    pipeline = assert_same_in_micro_batches(pipe, plain)

    for layer in (plain[1], pipeline[1]):
        assert isinstance(layer, Drawing)
        layer.generator = make()
    for module in (plain, pipeline):
        module.zero_grad()
    a_loss(torch.cat([plain(each) for each in rows(7).detach().tensor_split(M)])).backward()
    a_loss(pipeline(rows(7).detach())).backward()
    assert_same(gradients(pipeline), gradients(plain))


class LateDropout(nn.Module):
    """Counts, draws from a generator of its own, and edits a frozen weight; drops in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        self.weight.data.mul_(0.9)
        noise = torch.rand(3, generator=self.generator, dtype=x.dtype)
        return self.dropout(x * self.weight.clone() + len(self.calls) * noise)


def test_forward_that_runs_again_because_it_draws_for_the_first_time(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    """Once only buffers were restored, and everything else had moved on twice."""
    plain = around(LateDropout())
    pipeline = assert_same_in_micro_batches(pipe, plain)
    late, other = pipeline[1], plain[1]
    assert isinstance(late, LateDropout)
    assert isinstance(other, LateDropout)

    late.dropout.p = 0.5
    pipeline(rows(7)).sum().backward()

    x = rows(7).detach()
    for part in x.tensor_split(M):
        plain(part)
    assert_same(late.calls, other.calls)
    if mode != "never":  # there edits of frozen parameters are not looked for
        assert_same(late.weight, other.weight)
    assert_same(late.generator.get_state(), other.generator.get_state())


class LateCodes(nn.Module):
    """Edits a large buffer; drops in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Buffer(torch.ones(2**17, 3))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.codes.add_(1)
        return self.dropout(x * self.codes[0].clone())


def test_forward_that_runs_again_although_a_large_buffer_is_edited(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    layer = LateCodes()
    pipeline = pipe(around(layer), [2, 2], copy=False)
    for _ in range(3):
        pipeline(rows(7)).sum().backward()

    layer.dropout.p = 0.5
    if mode == "never":  # the buffer is not looked at, as nothing needs the value of before
        with pytest.raises(
            RuntimeError, match="must edit its buffer 'codes' in every forward or in none"
        ):
            pipeline(rows(7))
    else:
        pipeline(rows(7)).sum().backward()
        assert layer.codes[0, 0] == 1 + 4 * M


class Told(nn.Module):
    """Tells whether its forward is a recomputation."""

    def __init__(self, tell: Callable[[bool], None]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        self.tell(is_recomputing())
        return x


def test_layer_that_is_told_of_a_recomputation(pipe: Pipe, mode: ActivationCheckpointing) -> None:
    told: list[bool] = []  # not the layer's own: that would be restored
    pipeline = pipe(around(Told(told.append)), [2, 2], copy=False)

    pipeline(rows(7)).sum().backward()

    assert told.count(False) == M
    assert told.count(True) == RECOMPUTED[mode]
    assert not is_recomputing()
