"""Transparency: tensors that layers reuse have the plain module's gradient.

A layer computes attention biases or a kernel from its parameters, keeps them, and computes them no
more. The plain module uses them for all rows of a mini-batch. For a second mini-batch it cannot:
autograd has freed their graph. A pipeline does the same, and a gradient that it would lose raises.

Here are also the tests of ``lost_gradients``.
"""

import gc
import weakref
from collections.abc import Callable, MutableMapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import verify
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import a_loss, assert_same, gradients, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads

T = TypeVar("T")

always_and_never = pytest.mark.parametrize("mode", ["always", "never"])


class Kept(nn.Module):
    """Scales by what it computes from a parameter of its own and keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([0.3, 0.5, 0.9, 0.7]))

    def compute(self) -> Tensor:
        return self.table[torch.tensor([0, 2, 2])].exp()

    def scale(self) -> Tensor:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


class InAttribute(Kept):
    kept: Tensor | None = None

    def scale(self) -> Tensor:
        if self.kept is None:
            self.kept = self.compute()
        return self.kept

    def clear(self) -> None:
        self.kept = None


class InDict(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def scale(self) -> Tensor:
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.compute()
        return self.cache["cpu"]

    def clear(self) -> None:
        self.cache.clear()


class InNewDict(InDict):
    """As timm's layers do."""

    def clear(self) -> None:
        self.cache = {}


class InList(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = []

    def scale(self) -> Tensor:
        if not self.seen:
            self.seen.append(self.compute())
        first: Tensor = self.seen[0]
        return first

    def clear(self) -> None:
        self.seen.clear()


class Cache:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"of": {}}


class InObject(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def scale(self) -> Tensor:
        values: MutableMapping[int, Tensor] = self.cache.values["of"]
        return values.setdefault(3, self.compute()) if 3 not in values else values[3]

    def clear(self) -> None:
        self.cache.values["of"].clear()


class InBuffer(Kept):
    kept: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None, persistent=False)

    def scale(self) -> Tensor:
        if self.kept is None:
            self.kept = self.compute()
        return self.kept

    def clear(self) -> None:
        self.kept = None


class InLruCache(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.scale = lru_cache(self.compute)  # type: ignore[method-assign]  # as a decorator would

    def clear(self) -> None:
        self.scale.cache_clear()  # type: ignore[attr-defined]  # lru_cache has one

    def __deepcopy__(self, memo: dict[int, Any]) -> "InLruCache":
        return InLruCache().double()


class InClosure(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.get, self.forget = closure()

    def scale(self) -> Tensor:
        return self.get(self.compute)

    def clear(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> "InClosure":
        return InClosure().double()


def closure() -> tuple[Callable[[Callable[[], Tensor]], Tensor], Callable[[], None]]:
    found: list[Tensor] = []

    def get(compute: Callable[[], Tensor]) -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return get, found.clear


KINDS = [InAttribute, InDict, InNewDict, InList, InObject, InBuffer, InLruCache, InClosure]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# One where attributes are looked at, and one where nobody looks.
some_kinds = pytest.mark.parametrize("kind", [InDict, InClosure], ids=lambda kind: kind.__name__)


def around(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(perceptron(2), layer, *perceptron(2)).double()


def the(kind: type[T], module: nn.Module) -> T:
    """The layer of this class in a module."""
    (found,) = (each for each in module.modules() if isinstance(each, kind))
    return found


def of(module: nn.Module) -> Kept:
    return the(Kept, module)


def run(module: nn.Module, seed: int = 7) -> dict[str, Any]:
    module.zero_grad()
    x = rows(7, seed=seed)
    y = module(x)
    a_loss(y).backward()
    return {"y": y.detach(), "x": x.grad, **gradients(module)}


def assert_same_if_cleared(pipe: Pipe, kind: type[Kept], chunks: int) -> None:
    """Each of three mini-batches has the plain module's gradients, if nothing is left of others."""
    plain = around(kind())
    pipeline = pipe(plain, [2, 2], chunks=chunks)
    for k in range(3):
        of(plain).clear()
        expected = run(plain, k)
        of(pipeline).clear()
        assert_same(run(pipeline, k), expected)


@every_mode
@every_kind
def test_what_is_kept_for_one_mini_batch(pipe: Pipe, kind: type[Kept]) -> None:
    """Once it had the gradient of one micro-batch, if all were recomputed."""
    assert_same_if_cleared(pipe, kind, chunks=3)


@every_mode
@with_and_without_threads
@some_kinds
def test_what_is_kept_with_and_without_threads(pipe: Pipe, kind: type[Kept]) -> None:
    for chunks in (1, 2, 5):
        assert_same_if_cleared(pipe, kind, chunks)


@always_and_never
@some_kinds
def test_what_is_kept_without_gradients(pipe: Pipe, kind: type[Kept]) -> None:
    plain = around(kind())
    pipeline = pipe(plain, [2, 2])
    of(plain).clear()

    for module in (plain, pipeline):
        with torch.no_grad():
            module(rows(7))
    expected = [run(plain, k) for k in range(3)]
    actual = [run(pipeline, k) for k in range(3)]

    assert_same(actual, expected)
    assert "1.table" not in actual[0]


@always_and_never
@every_kind
def test_what_is_kept_for_the_next_mini_batch_too(pipe: Pipe, kind: type[Kept]) -> None:
    """The plain module fails as well."""
    plain = around(kind())
    pipeline = pipe(plain, [2, 2])
    run(plain)
    with pytest.raises(RuntimeError, match="second time"):
        run(plain)
    of(plain).clear()

    run(pipeline)
    with pytest.raises(RuntimeError, match=r"a gradient for layer 1\.table .* would be lost"):
        run(pipeline)

    of(pipeline).clear()
    assert_same(run(pipeline), run(plain))


NAMES = {
    InAttribute: r"layer 1\.kept\.",
    InDict: r"layer 1\.cache\['cpu'\]\.",
    InList: r"layer 1\.seen\[0\]\.",
    InObject: r"layer 1\.cache\.values\['of'\]\[3\]\.",
    InBuffer: r"layer 1\.kept\.",
}


@always_and_never
@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_error_names_where_it_is_kept(pipe: Pipe, kind: type[Kept]) -> None:
    pipeline = pipe(around(kind()), [2, 2])
    run(pipeline)

    with pytest.raises(RuntimeError, match=f"are kept in {NAMES[kind]}"):
        run(pipeline)


@always_and_never
@every_kind
def test_what_a_forward_without_backward_left(pipe: Pipe, kind: type[Kept]) -> None:
    """Its mini-batch is gone, and a gradient in it was lost once."""
    pipeline = pipe(around(kind()), [2, 2])
    pipeline(rows(7))

    with pytest.raises(RuntimeError, match=r"layer 1\.table .* would be lost"):
        run(pipeline)


@always_and_never
@some_kinds
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1]], ids=str)
def test_two_forwards_before_a_backward(
    pipe: Pipe, kind: type[Kept], chunks: int, order: list[int]
) -> None:
    pipeline = pipe(around(kind()), [2, 2], chunks=chunks)

    with pytest.raises(RuntimeError, match=r"layer 1\.table .* would be lost|second time"):
        several_forwards(pipeline, order)


def several_forwards(pipeline: GPipe, order: list[int]) -> None:
    losses = [a_loss(pipeline(rows(7, seed=k))) for k in range(2)]
    for k in order:
        losses[k].backward()
    del losses
    pipeline(rows(7))


class Fails(nn.Module):
    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a failure")
        return x


@always_and_never
@some_kinds
@pytest.mark.parametrize("kept", [True, False], ids=["error kept", "error gone"])
def test_what_a_forward_that_failed_left(pipe: Pipe, kind: type[Kept], kept: bool) -> None:
    pipeline = pipe(nn.Sequential(*around(kind()), Fails()), [2, 3])
    with pytest.raises(ValueError, match="a failure") as caught:
        pipeline(rows(7))
    if not kept:
        del caught

    the(Fails, pipeline).fails = False
    with pytest.raises(RuntimeError, match=r"layer 1\.table .* would be lost"):
        run(pipeline)


@always_and_never
@some_kinds
def test_forward_that_runs_again_because_it_draws(pipe: Pipe, kind: type[Kept]) -> None:
    """What its first attempt kept where nobody looks belongs to an attempt that is gone."""
    dropout = nn.Dropout(0.0)
    pipeline = pipe(nn.Sequential(*around(kind()), dropout), [2, 3], copy=False)
    run(pipeline)
    of(pipeline).clear()
    dropout.p = 0.5

    if kind is InClosure:
        with pytest.raises(RuntimeError, match=r"layer 1\.table .* would be lost"):
            run(pipeline)
    else:
        assert run(pipeline)["1.table"].abs().sum() > 0


class Late(InDict):
    """Keeps nothing at first."""

    keeps = False

    def scale(self) -> Tensor:
        return super().scale() if self.keeps else self.compute()


@every_mode
def test_layer_that_begins_to_keep(pipe: Pipe, mode: ActivationCheckpointing) -> None:
    plain = around(Late())
    pipeline = pipe(plain, [2, 2])
    for _ in range(3):
        run(pipeline)
    for module in (plain, pipeline):
        the(Late, module).keeps = True

    with pytest.raises(RuntimeError, match="second time|always or never") as caught:
        run(pipeline)
    if "second time" in str(caught.value):
        assert "let it compute the tensor in each forward" in str(caught.value)


class Passes(nn.Module):
    """Adds the mean of the micro-batch before, with its graph."""

    previous: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2 + self.previous
        if not self.late:
            self.previous = y.mean()
        return y


@every_mode
def test_what_is_computed_from_another_micro_batch(pipe: Pipe) -> None:
    pipeline = pipe(around(Passes()), [2, 2])

    with pytest.raises(
        RuntimeError, match=r"the input of stage 0 .* are kept in layer 1\.previous"
    ):
        pipeline(rows(7))


@every_mode
def test_what_is_computed_from_another_micro_batch_later(
    pipe: Pipe, mode: ActivationCheckpointing
) -> None:
    plain = around(Passes())
    pipeline = pipe(plain, [2, 2])
    layers = [the(Passes, module) for module in (plain, pipeline)]
    for layer in layers:
        layer.late = True
    for _ in range(3):
        run(pipeline)
    for layer in layers:
        layer.late = False

    with pytest.raises(RuntimeError, match="would be lost|second time|always or never"):
        run(pipeline)


class Codes(nn.Module):
    """Keeps a learned code next to a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"calls": 0, "code": torch.full((3,), 0.5).double()}
        self.state["code"].requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return x * self.state["code"]


@every_mode
def test_learned_code_in_a_dict_that_changes(pipe: Pipe) -> None:
    """Once a recomputation had a copy of it, which took the gradient."""
    plain = around(Codes())
    pipeline = pipe(plain, [2, 2])

    for _ in range(3):
        expected, actual = run(plain), run(pipeline)
        assert_same(actual, expected)
    codes = [the(Codes, module).state["code"].grad for module in (plain, pipeline)]
    assert_same(codes[1], codes[0])


class Sums(nn.Module):
    """Adds up something with a graph in place, for its user to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"mean": torch.zeros(()).double()}

    def forward(self, x: Tensor) -> Tensor:
        self.sums["mean"] += x.mean()
        return x


@every_mode
def test_sum_in_place_that_no_layer_uses(pipe: Pipe) -> None:
    plain = around(Sums())
    pipeline = pipe(plain, [2, 2])

    for _ in range(2):
        assert_same(run(pipeline), run(plain))
        for module in (plain, pipeline):
            sums = the(Sums, module).sums
            sums["mean"] = sums["mean"].detach()


@every_mode
def test_what_another_stage_keeps(pipe: Pipe) -> None:
    """A layer uses what one of the stage before computes from its parameters and keeps.

    It depends on the threads whether the stages know of each other's graphs.
    """
    first = InAttribute()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.others = [first]

        def forward(self, x: Tensor) -> Tensor:
            return x + self.others[0].scale()

    plain = nn.Sequential(perceptron(2), first, *perceptron(2), Uses()).double()
    expected = run(deepcopy(plain))
    pipeline = pipe(plain, [2, 3])

    try:
        actual = run(pipeline)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
    else:
        assert_same(actual, expected)


# Models that are no nn.Sequential.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = InDict()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.kept(self.linear(x)))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Graph(nn.Module):
    """Uses what a layer keeps once more, far away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        third: Tensor = self.third(self.second(y) + x)
        return third + y


@every_mode
@pytest.mark.parametrize("model, module", [(Loop, "blocks"), (Graph, None)])
def test_model_whose_layers_keep_tensors(
    model: type[nn.Module], module: str | None, mode: ActivationCheckpointing
) -> None:
    plain = model().double()
    balance: list[Any] = [2, 2] if module else ["second", "third"]
    devices = ["cpu"] * (2 if module else 3)
    pipeline = GPipe(
        deepcopy(plain),
        balance,
        module=module,
        devices=devices,
        chunks=3,
        activation_checkpointing=mode,
    )
    try:
        for k in range(2):
            for each in (plain, pipeline):
                for layer in each.modules():
                    if isinstance(layer, InDict):
                        layer.clear()
            expected = run(plain, k)
            assert_same(run(pipeline, k), expected)
        with pytest.raises(RuntimeError, match=r"kept\.table .* would be lost.*kept\.cache"):
            run(pipeline)
    finally:
        pipeline.close()


class KeepsItsNorm(nn.Linear):
    """Keeps a loss term, as a layer with a penalty of its activations may."""

    norm: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.norm = y.square().mean()
        return y


@always_and_never
@pytest.mark.parametrize("to", ["the input", "all parameters", "all by backward"])
def test_gradients_of_some_leaves_warn_of_what_is_kept(pipe: Pipe, to: str) -> None:
    """They do not go to the leaves whose gradient would raise, so a part would be missing."""
    pipeline = pipe(around(KeepsItsNorm(3, 3)), [2, 2])
    x = rows(7)

    def gradient() -> None:
        loss = a_loss(pipeline(x)) + the(KeepsItsNorm, pipeline).norm
        if to == "all by backward":
            loss.backward(inputs=list(pipeline.parameters()))
        else:
            sources = [x] if to == "the input" else list(pipeline.parameters())
            torch.autograd.grad(loss, sources, allow_unused=True)

    with pytest.warns(UserWarning, match=r"got layer 1\.norm\. If the loss uses one beside"):
        gradient()


@pytest.mark.filterwarnings("error")
def test_gradients_of_some_leaves_without_a_warning(pipe: Pipe) -> None:
    """Nothing is kept; or its gradient goes to each leaf; or a verification runs."""
    for layer in (nn.Linear(3, 3), KeepsItsNorm(3, 3)):
        pipeline = pipe(around(layer), [2, 2])
        a_loss(pipeline(rows(7))).backward()
        verify(pipeline, rows(7)).check()
    pipeline = pipe(around(nn.Linear(3, 3)), [2, 2])
    torch.autograd.grad(a_loss(pipeline(rows(7))), list(pipeline.parameters()))


class Keeps(nn.Linear):
    """Keeps its output with its graph, without using it again."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept * 1


def test_kept_tensor_does_not_keep_the_pipeline() -> None:
    """Its leaf had a hook with the stage, its layers and its connections: memory for ever."""
    layers = nn.Sequential(Keeps(4, 4), nn.Linear(4, 4))
    piped = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2)
    piped(rows(4, 4).float()).sum().backward()
    alive = weakref.ref(piped.stages[0])
    piped.close()
    del piped, layers
    gc.collect()

    assert alive() is None
