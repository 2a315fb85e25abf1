"""Forwards that cannot be cut are refused with the user's line, or run as one layer.

Here are also the tests of ``inplace_edits``, ``row_dims``, ``row_rules``, ``row_trial``,
``traced_attributes``, ``traced_call`` and ``watching``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import whole
from lightning_gpipe.core.frontends.traced import TracedForward
from tests.support.models import assert_same
from tests.support.traced import Tracing, assert_same_run
from tests.support.traced import tracing as tracing  # a fixture
from tests.support.traced_models import Modes

WIDTH = 4
GENERATOR, COUNTER = random.Random(1), itertools.count(1)


def rows(count: int = 7) -> Tensor:
    return torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).view(count, WIDTH).sin()


@dataclass(slots=True)
class Counter:
    """An object without a dict of attributes."""

    count: int


class Model(nn.Module):
    """Two layers, and a function between them that a test gives."""

    scale: Tensor
    pair: nn.Module

    def __init__(self, between: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.between = between
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.steps = 0
        self.seen: list[Any] = []
        self.counter = Counter(0)
        self.counts = np.zeros(1)
        self.register_buffer("scale", torch.tensor(2.0))
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.between(self, self.first(x)))


def branches(model: Model, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def loops(model: Model, x: Tensor) -> Tensor:
    return torch.stack([row + 1 for row in x])


def counts(model: Model, x: Tensor) -> Tensor:
    model.steps += 1
    return x


def remembers(model: Model, x: Tensor) -> Tensor:
    model.seen.append(x)
    return x


def counts_in_slots(model: Model, x: Tensor) -> Tensor:
    model.counter.count += 1
    return x * model.counter.count


def counts_in_an_array(model: Model, x: Tensor) -> Tensor:
    model.counts[0] += 1
    return x * int(model.counts[0])


def draws(model: Model, x: Tensor) -> Tensor:
    return x + torch.randn(WIDTH)


def draws_in_python(model: Model, x: Tensor) -> Tensor:
    return x * random.random()


def draws_in_numpy(model: Model, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def draws_from_its_own(model: Model, x: Tensor) -> Tensor:
    return x * float(model.seen[0].random())


def draws_from_a_global(model: Model, x: Tensor) -> Tensor:
    return x * GENERATOR.random()


def takes_the_next(model: Model, x: Tensor) -> Tensor:
    return x * next(COUNTER)


def item(model: Model, x: Tensor) -> Tensor:
    return x * float(x.max())


def asks_for_the_class(model: Model, x: Tensor) -> Tensor:
    y = x.max(0)
    return x if isinstance(y, Tensor) else x + y[0]


def length(model: Model, x: Tensor) -> Tensor:
    return x * len(x)


def all_parameters(model: Model, x: Tensor) -> Tensor:
    return x + sum(p.sum() for p in model.parameters())


def divides_by_rows(model: Model, x: Tensor) -> Tensor:
    return x / x.size(0)


def multiplies_by_half_of_the_rows(model: Model, x: Tensor) -> Tensor:
    return (x.shape[0] // 2) * x


def first_half(model: Model, x: Tensor) -> Tensor:
    n = x.shape[0]
    return x[: n // 2]


def adds_numbers_of_rows(model: Model, x: Tensor) -> Tensor:
    return x + torch.arange(x.size(0)).unsqueeze(1)


def adds_positions_of_rows(model: Model, x: Tensor) -> Tensor:
    return x + torch.arange(x.size(0))[:, None]


def turns_rows_around(model: Model, x: Tensor) -> Tensor:
    return x[torch.arange(x.size(0) - 1, -1, -1)]


def masks_a_diagonal(model: Model, x: Tensor) -> Tensor:
    return x.masked_fill(torch.eye(x.size(0), WIDTH).bool(), 0.0)


def divides_by_the_sum(model: Model, x: Tensor) -> Tensor:
    return x / (x.sum() + 1)


def own_module(model: Model, x: Tensor) -> Tensor:
    return nn.Linear(WIDTH, WIDTH)(x)


def subtracts_the_mean(model: Model, x: Tensor) -> Tensor:
    return x - x.mean(0)


def softmax_over_rows(model: Model, x: Tensor) -> Tensor:
    return torch.softmax(x, dim=0)


def flips(model: Model, x: Tensor) -> Tensor:
    return x + x.flip([0])


def sorts(model: Model, x: Tensor) -> Tensor:
    return x.sort(0).values


def first_row(model: Model, x: Tensor) -> Tensor:
    return x + x[0]


def later_rows(model: Model, x: Tensor) -> Tensor:
    return x.tanh()[1:]


def listed_rows(model: Model, x: Tensor) -> Tensor:
    return x.tanh()[[0, 2]]


def edits_a_row(model: Model, x: Tensor) -> Tensor:
    x[0] = 0
    return x


def similarities(model: Model, x: Tensor) -> Tensor:
    return (x @ x.t()).mean(1, keepdim=True) * x


def similarities_by_einsum(model: Model, x: Tensor) -> Tensor:
    return torch.einsum("ac,bc,bd->ad", x, x, x)


def similarities_by_linear(model: Model, x: Tensor) -> Tensor:
    return F.linear(x, x).mean(1, keepdim=True) * x


def variance_after_moves(model: Model, x: Tensor) -> Tensor:
    return x / x.unsqueeze(1).transpose(0, 1).permute(1, 0, 2).var((0, 1))


def sums_by_ones(model: Model, x: Tensor) -> Tensor:
    return x + torch.ones(1, x.size(0), dtype=x.dtype) @ x


def sums_by_new_ones(model: Model, x: Tensor) -> Tensor:
    return x + x.new_ones((1, x.size(0))) @ x


def pools(model: Model, x: Tensor) -> Tensor:
    return x + F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t()


def multiplies_batches(model: Model, x: Tensor) -> Tensor:
    y = x.unsqueeze(0)
    return x + torch.bmm(y.transpose(1, 2), y)[0].sum(1)


def joins_rows(model: Model, x: Tensor) -> Tensor:
    return torch.cat([x, x])


def splits_rows(model: Model, x: Tensor) -> Tensor:
    one, other = x.chunk(2)
    return one + other


def rows_of_a_part(model: Model, x: Tensor) -> Tensor:
    return x + x.chunk(2, -1)[::-1][0][1:].sum()


def normalizes(model: Model, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def layer_of_the_sum(model: Model, x: Tensor) -> Tensor:
    return model.first(x.sum().view(1, 1).expand(1, WIDTH))


def edits_a_buffer(model: Model, x: Tensor) -> Tensor:
    model.scale.mul_(0.5)
    return x


def edits_a_view_of_a_parameter(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.first.weight[0] = 0
    return x


def chooses_a_kernel(model: Model, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x, x, x)


def infers(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * 2
    return x + y


REFUSED = {
    branches: "control flow",
    loops: "iterated",
    counts: "it changes Model.steps",
    remembers: "it changes Model.seen",
    counts_in_slots: r"it changes Model.counter.count",
    counts_in_an_array: "it changes Model.counts",
    draws: "draws random numbers",
    draws_in_python: "draws random numbers",
    draws_in_numpy: "draws random numbers",
    draws_from_a_global: "draws random numbers",
    takes_the_next: "draws random numbers or counts",
    item: "needs a number",
    asks_for_the_class: "asks for the class of a value",
    length: "length of a value",
    all_parameters: "parameters that it does not read as attributes",
    divides_by_rows: "number of rows .* computes with it",
    multiplies_by_half_of_the_rows: "number of rows .* computes with it",
    first_half: "number of rows .* takes rows by it",
    adds_numbers_of_rows: "number of rows .* counts up to it",
    adds_positions_of_rows: "number of rows .* counts up to it",
    turns_rows_around: "number of rows .* counts up to it",
    masks_a_diagonal: "number of rows .* counts up to it",
    divides_by_the_sum: "must not compute over all rows",
    subtracts_the_mean: "computes mean along dim 0",
    softmax_over_rows: "computes softmax along dim 0",
    flips: "computes flip along dim 0",
    sorts: "computes sort along dim 0",
    first_row: "takes some of the rows",
    later_rows: "takes some of the rows",
    listed_rows: "takes some of the rows",
    rows_of_a_part: "takes some of the rows",
    edits_a_row: "takes some of the rows",
    similarities: "multiplies rows with rows",
    similarities_by_einsum: "multiplies rows with rows",
    similarities_by_linear: "multiplies rows with rows",
    sums_by_ones: "multiplies rows with rows",
    sums_by_new_ones: "multiplies rows with rows",
    pools: "computes avg_pool1d of rows that are not in dim 0",
    multiplies_batches: "multiplies rows with rows",
    variance_after_moves: "computes var along dim 0",
    joins_rows: "computes cat along dim 0",
    splits_rows: "computes chunk along dim 0",
    normalizes: "normalizes over all rows",
    layer_of_the_sum: "must not compute over all rows",
    edits_a_buffer: "changes scale",
    edits_a_view_of_a_parameter: "changes first.weight",
    chooses_a_kernel: "changes what sdpa_kernel sets",
    infers: "changes what inference_mode sets",
    own_module: "draws random numbers|is no module of the model",
}


NO_LINE = (
    counts,
    remembers,
    counts_in_slots,
    counts_in_an_array,
    draws_in_python,
    draws_in_numpy,
    draws_from_a_global,
    takes_the_next,
)


@pytest.mark.parametrize("between", REFUSED, ids=lambda between: between.__name__)
def test_forward_that_cannot_be_traced(between: Callable[..., Any]) -> None:
    model = Model(between)
    before = {name: value for name, value in vars(model).items() if name != "_modules"}
    state = torch.get_rng_state()

    with pytest.raises(TypeError, match=REFUSED[between]) as raised:
        TracedForward(model, "").partitions([1, 1])

    if between not in NO_LINE:
        assert "test_refusals.py:" in str(raised.value)
    assert {name: value for name, value in vars(model).items() if name != "_modules"} == before
    assert (model.steps, model.seen, model.counter.count, model.counts[0]) == (0, [], 0, 0)
    assert torch.equal(torch.get_rng_state(), state)


class Chain(nn.Module):
    """Layers in a row, for forwards with arguments that a call may omit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def run(self, x: Any) -> Any:
        return self.second(self.first(x).relu())


class Either(Chain):
    def forward(self, ids: Any = None, embedded: Any = None) -> Any:
        if (ids is None) == (embedded is None):
            raise ValueError("either ids or embedded must be passed")
        return self.run(embedded)


class Timed(Chain):
    def forward(self, x: Tensor, t: Any = None) -> Any:
        return self.run(x * t.unsqueeze(1))


class Named(Chain):
    def forward(self, **batch: Any) -> Any:
        return self.run(batch["x"])


class Branching(Chain):
    def forward(self, x: Tensor, t: Any = None) -> Any:
        return self.run(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    "kind, message",
    [
        (Either, r"\(ValueError\), at .* omits ids=None, embedded=None: .* Otherwise move"),
        (Timed, r"\(AttributeError\), at .* omits t=None: .* remove the default"),
        (Named, r"\(KeyError\), at .* omits \*\*batch: .* in \*args or \*\*kwargs"),
        (Branching, r"\(TraceError\), at .*\. Move that line"),
    ],
)
def test_forward_that_needs_more_than_its_required_arguments(
    kind: type[nn.Module], message: str
) -> None:
    """The advice was to move the line into a module, though no call of the user is like that."""
    with pytest.raises(TypeError, match=message):
        TracedForward(kind(), "")


def test_generator_of_a_model(tracing: Tracing) -> None:
    """The number that it drew in the trace was in all later steps."""
    model = Model(draws_from_its_own)
    model.seen = [np.random.default_rng(0)]

    with pytest.raises(TypeError, match="draws random numbers"):
        TracedForward(model, "")
    assert model.seen[0].random() == np.random.default_rng(0).random()


def test_numbers_with_the_sizes_of_a_value_are_drawn_for_each_micro_batch(tracing: Tracing) -> None:
    """The guide said that they are refused."""
    noisy = tracing(Model(lambda model, x: x + torch.randn_like(x)))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        output = noisy(x := rows().requires_grad_())
        output.exp().sum().backward()
        found.append((output, x.grad))

    assert_same(*found)


class Doubles(nn.Module):
    """Edits its input, without saying so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def used_later(model: Model, x: Tensor) -> Tensor:
    x = x.tanh()
    return model.pair(x) + model.first(x)


def used_before(model: Model, x: Tensor) -> Tensor:
    x = x * 1
    return model.first(x).detach() + model.pair(x)


def test_layer_that_edits_what_is_used_later(tracing: Tracing) -> None:
    model = Model(used_later)
    model.pair = Doubles()

    with pytest.raises(TypeError, match=r"pair, called at .*test_refusals.py:\d+, has done so"):
        tracing(model, 2)(rows())


def test_layer_that_edits_what_is_its_own(tracing: Tracing) -> None:
    plain = Model(used_before)
    plain.pair = Doubles()

    torch.testing.assert_close(tracing(plain, 2)(rows()), plain(rows()))


class Pair(nn.Module):
    """A layer that returns a tuple, or a tensor."""

    def __init__(self, several: bool) -> None:
        super().__init__()
        self.several = several

    def forward(self, x: Tensor) -> Any:
        return (x + 1, x) if self.several else x + 1


def of_a_layer(model: Model, x: Tensor) -> Tensor:
    return model.pair(x)[0] + x


def by_number(model: Model, x: Tensor) -> Tensor:
    return x[x.argmax(1) // 2]


@pytest.mark.parametrize("between", [of_a_layer, by_number], ids=lambda each: each.__name__)
def test_rows_that_are_taken_by_number(tracing: Tracing, between: Callable[..., Any]) -> None:
    model = Model(between)
    model.pair = Pair(several=False)

    with pytest.raises(TypeError, match=r"across the rows .*test_refusals.py:\d+"):
        tracing(model, 2)(rows())


def distances(model: Model, x: Tensor) -> Tensor:
    return x * torch.cdist(x, x).sum(1, keepdim=True)


def sums_by_a_row(model: Model, x: Tensor) -> Tensor:
    return x + model.scale.view(1, 1).expand(1, x.size(0)) @ x


def lower_triangle(model: Model, x: Tensor) -> Tensor:
    return x.tril()


def outer_product(model: Model, x: Tensor) -> Tensor:
    return x * torch.outer(x[:, 0], x[:, 1]).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "between",
    [distances, sums_by_a_row, lower_triangle, outer_product],
    ids=lambda each: each.__name__,
)
def test_matrix_of_all_rows(tracing: Tracing, between: Callable[..., Any]) -> None:
    """Each micro-batch had a matrix of its own rows: another result, without a word."""
    with pytest.raises(TypeError, match=r"across the rows .*test_refusals.py:\d+"):
        tracing(Model(between), 2)(rows())


def counted(x: Tensor) -> Tensor:
    return (9 * x[:, 0].abs()).long() + 1


ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed from the end, mean": lambda x: x - x.transpose(-1, -2).mean(-1),
    "mean from the end": lambda x: x - x.sum(1).mean(-1),
    "softmax of one dim": lambda x: x * x[:, 0].softmax(-1)[:, None],
    "rows moved to the end, sum": lambda x: x + x.unsqueeze(1).transpose(0, -1).sum(-1).t(),
    "movedim": lambda x: x - x.movedim(0, 1).mean(1),
    "movedim from the end": lambda x: x - x.movedim(-1, 0).mean(-1),
    "mT": lambda x: x + x.mT.cumsum(-1).mT,
    "diagonal": lambda x: x + x @ torch.ones(WIDTH, WIDTH).double() * x.diagonal().sum(),
    "fft": lambda x: torch.fft.fft(x, dim=0).real,
    "fft from the end": lambda x: x * torch.fft.fft(x[:, 0]).abs()[:, None],
    "fft2": lambda x: torch.fft.fft2(x).real,
    "fftn": lambda x: torch.fft.fftn(x[:, None]).real[:, 0],
    "fftshift": lambda x: torch.fft.fftshift(x),
    "trapezoid": lambda x: x + torch.trapezoid(x, dim=0),
    "trapezoid from the end": lambda x: x + torch.trapezoid(x[:, 0]),
    "pool over transposed rows": lambda x: x + F.avg_pool1d(x.transpose(-1, -2), 3, 1, 1).mT,
    "rotated": lambda x: torch.rot90(x, 2),
    "rolled": lambda x: x.roll(1, 0),
    "largest from the end": lambda x: x - x.amax(-2),
    "scaled by the largest": lambda x: x / x.abs().amax((-2, -1)),
    "smallest and largest": lambda x: x - torch.aminmax(x, dim=-2)[0],
    "different ones": lambda x: x * x.unique(return_inverse=True)[1],
    "any": lambda x: x * (x > 0.7).any(-2),
    "all rolled": lambda x: torch.roll(x, 1),
    "strides": lambda x: x + x.as_strided((x.size(0), WIDTH), (0, 1)),
    "trace": lambda x: x * x.trace(),
    "einsum without an arrow": lambda x: x * torch.einsum("ij,ij", x, x),
    "einsum with dots": lambda x: x * torch.einsum("...i,...i->i", x, x),
    "instance norm": lambda x: F.instance_norm(x.t()[None])[0].t(),
    "group norm": lambda x: x + F.local_response_norm(x.t()[None, :, :, None], 2)[0, :, :, 0].t(),
    "norm": lambda x: x / torch.linalg.vector_norm(x),
    "norm of an order": lambda x: x / x.norm(2),
    "deviation": lambda x: x / x.std(False),
    "quantile": lambda x: x - x.quantile(0.5),
    "number that are not zero": lambda x: x * torch.count_nonzero(x),
    "variance and mean": lambda x: x - torch.var_mean(x)[1],
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "view of transposed rows": lambda x: x.t().contiguous().view_as(x),
    "view of all rows": lambda x: x.reshape(1, -1).softmax(-1).reshape(-1, WIDTH),
    "embedding bag": lambda x: (
        x + F.embedding_bag(x.argmax(1), x.new_ones(WIDTH, WIDTH), x.argmax(0)[:1] * 0)
    ),
    "number of rows among others": lambda x: x * x.shape[:2][0],
    "number of rows from the end": lambda x: x / x.shape[-2],
    "size of rows from the end": lambda x: x / x.size(-2),
    "product of sizes": lambda x: x / x.shape.numel(),
    "number of rows in a tensor": lambda x: x * torch.tensor(x.size(0)),
    "number of rows in a filled tensor": lambda x: x * torch.full((1,), x.size(0)),
    "number of rows in a new tensor": lambda x: x * x.new_full((1,), x.size(0)),
    "differences of all rows": lambda x: (x[:, None] - x[None]).square().sum(1),
    "similarities of all rows": lambda x: (
        x * F.cosine_similarity(x[:, None], x[None], dim=-1).sum(1, keepdim=True)
    ),
    "smallest": lambda x: x - x.kthvalue(1, 0).values,
    "number of rows twice": lambda x: x * (x.shape[-2] * 2),
    "dot product": lambda x: x / x.flatten().dot(x.flatten()),
    "dot product of integers": lambda x: x / counted(x).dot(counted(x)),
    "sums of integers": lambda x: (
        x / x.new_ones(1).long().index_add(0, torch.zeros_like(x[:, 0]).long(), counted(x))
    ),
    "dot product after a row of zeros": lambda x: (
        x * (x[:, 0] > x[:, 0].detach()).double().dot(x.new_ones(x.size(0)))
    ),
    "norm of a matrix": lambda x: x / torch.linalg.matrix_norm(x),
    "sums of classes": lambda x: (
        x + x.new_zeros(1, WIDTH).index_add(0, torch.zeros_like(x[:, 0]).long(), x)
    ),
    "repeated": lambda x: x.repeat(2, 1),
    "tiled": lambda x: x.tile(2, 1),
    "stacked and flattened": lambda x: torch.stack([x, x]).flatten(0, 1),
    "expanded and reshaped": lambda x: x[None].expand(2, -1, WIDTH).reshape(-1, WIDTH),
    "memory filled across": lambda x: torch.empty_like(x).copy_(x.cumsum(-2)),
    "memory filled with another row": lambda x: x.new_empty(x.shape).copy_(x.roll(1, -2)),
    "normalized over all dims": lambda x: F.layer_norm(x, x.shape),
}


@pytest.mark.parametrize("count", [7, 3])
@pytest.mark.parametrize("name", ACROSS)
def test_rows_mixed_by_any_function(tracing: Tracing, name: str, count: int) -> None:
    """Dims from the end, and functions that no rule tells of, let micro-batches count alone.

    A trial was not repeated, if its error had ended the verification of a few rows. With one row
    for each micro-batch, the trial had the same row twice: their mean is that of one.
    """

    def run_twice() -> None:
        run = tracing(Model(lambda model, x: ACROSS[name](x)), 2)
        with suppress(TypeError):
            run(rows(count))
        run(rows(count))

    with pytest.raises(TypeError, match=r"across the rows .*test_refusals.py:\d+|over all rows"):
        run_twice()


def rotated(x: Tensor, memory: Tensor) -> Tensor:
    """Fill memory as rotary embeddings do."""
    memory[..., 0::2] = -x[..., 1::2]
    memory[..., 1::2] = x[..., 0::2]
    return memory


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "moved by dims": lambda x: x.movedim(0, 1).cumsum(0).moveaxis(1, 0),
    "checked": lambda x: x + F.binary_cross_entropy(x.sigmoid(), x.sigmoid(), reduction="none"),
    "table": lambda x: x + torch.ones(9, WIDTH).double()[(x.abs().amax(1) * 4).long()],
    "attention": lambda x: (
        (x[:, :, None] @ x[:, :, None].transpose(-2, -1)).softmax(-1) @ x[:, :, None]
    ).squeeze(-1),
    "movedim": lambda x: x + x[:, :, None].movedim(1, -1).mean(1).movedim(-1, 1),
    "moved and back": lambda x: x + x.transpose(0, 1).cumsum(0).transpose(1, 0),
    "mT": lambda x: x + x[:, None].mT.cumsum(-2).mT.sum(-2),
    "diagonal": lambda x: x + (x[:, :, None] * x[:, None]).diagonal(dim1=-2, dim2=-1),
    "fft": lambda x: torch.fft.fft(x).real + torch.fft.fft2(x[:, None]).real[:, 0],
    "trapezoid": lambda x: x + torch.trapezoid(x)[:, None],
    "pool": lambda x: x + F.max_pool1d(x[:, None], 3, 1, 1)[:, 0],
    "einsum": lambda x: x * torch.einsum("...i,ji->...j", x, x.new_ones(WIDTH, WIDTH)),
    "rows last": lambda x: x + x.unsqueeze(1).transpose(0, -1).sum(0).t(),
    "inserted": lambda x: x + x.unsqueeze(-2).squeeze(-2) + torch.stack([x, x], -1).sum(-1),
    "reductions along a dim": lambda x: (
        x / x.norm(2, -1, True) - x.quantile(0.5, 1)[:, None] + x.renorm(2, 0, 1.0)
    ),
    "views": lambda x: x + x.exp().view_as(x) + x.view(x.size(0), -1).reshape(-1, WIDTH),
    "rows inside of their entries": lambda x: (
        x + (x[None].expand(2, -1, WIDTH).reshape(-1, WIDTH) * 2).view(2, -1, WIDTH).sum(0)
    ),
    "sizes of rows": lambda x: (
        x.view(x.size(0), x.shape[1:].numel()) * x[:, None].shape[1:].numel()
    ),
    "sparse": lambda x: x + (x.to_sparse() @ torch.ones(WIDTH, WIDTH).double()).to_dense(),
    "entries of rows": lambda x: x.repeat_interleave(2, 0).cos().unflatten(0, (-1, 2)).sum(1),
    "fills memory": lambda x: rotated(x, torch.empty_like(x)),
    "memory full in another dim": lambda x: x * torch.full_like(x.t(), 2.0).t(),
    "fills memory by a method": lambda x: rotated(x, x.new_empty(x.shape)),
    "fills memory of a size": lambda x: rotated(x, torch.empty(x.size(0), WIDTH).double()),
    "fills strided memory": lambda x: rotated(
        x, torch.empty_strided((x.size(0), WIDTH), (WIDTH, 1), dtype=x.dtype)
    ),
    "pads": lambda x: F.pad(x, [1, 1])[:, 1:-1] + F.alpha_dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("count", [7, 3])
@pytest.mark.parametrize("name", APART)
def test_rows_apart_by_any_function(tracing: Tracing, name: str, count: int) -> None:
    plain = Model(lambda model, x: APART[name](x))

    assert_same_run(tracing(plain, 2), plain, rows(count))


class Graph(nn.Module):
    """Adds up the neighbours of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        return self.second(neighbours @ self.first(nodes))


def test_step_whose_shapes_do_not_fit_once_they_are_cut(tracing: Tracing) -> None:
    piped = tracing(Graph())

    for neighbours in (torch.eye(7).double(), whole(torch.eye(7).double())):
        with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
            piped(rows(), neighbours)
        (note,) = (x for x in raised.value.__notes__ if "needs all rows at once" in x)
        assert "marked by whole()" in note


class Cosines(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cos.default
        return func(*args, **(kwargs or {}))


def test_single_rows_are_tried_once(tracing: Tracing) -> None:
    """Micro-batches of one row ran everything between layers twice, in every step."""
    run, counts = tracing(Model(lambda model, x: x.cos()), 2), []
    for count in (3, 3, 7, 7):
        with Cosines() as cosines:
            run(rows(count))
        counts.append(cosines.count)

    assert counts == [4, 3, 4, 3]


class States(nn.Module):
    """A recurrent layer or attention, and a function of one of its outputs."""

    def __init__(self, layer: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.second = nn.Linear(WIDTH, WIDTH)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.layer, self.first(x)))


def lstm() -> nn.Module:
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


def of_all_rows(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.reshape(-1, WIDTH)
    return layer(layer(x)).softmax(-2)


MIXED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "state": (lstm, lambda lstm, x: x - lstm(x)[1][0][-1].mean(0)),
    "cell": (lstm, lambda lstm, x: x - lstm(x)[1][1].amax(1)),
    "weights": (attention, lambda layer, x: x + layer(x, x, x)[1].softmax(0) @ x),
    "rows as times": (lstm, lambda lstm, x: lstm(x[:, 0][None])[0][0][:, None] + x),
    "rows as keys": (
        attention,
        lambda layer, x: x + layer(*[x.reshape(1, -1, WIDTH)] * 3)[0].view(x.shape),
    ),
    "of layers of folded rows": (lambda: nn.Linear(WIDTH, WIDTH), of_all_rows),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("balance", [[3], [1, 1, 1], [2, 1]], ids=str)
def test_rows_mixed_after_a_layer(tracing: Tracing, name: str, balance: list[int]) -> None:
    """Only the first output of a layer was known, and none of folded rows or after two layers."""
    layer, function = MIXED[name]
    x = rows(7 * 3).view(7, 3, WIDTH)

    with pytest.raises((TypeError, ValueError), match=r"across the rows .*test_refusals.py:\d+"):
        tracing(States(layer(), function), balance)(x)


KEPT: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "state": (lstm, lambda lstm, x: x + lstm(x)[1][0][-1].softmax(-1)[:, None]),
    "weights": (attention, lambda layer, x: x + layer(x, x, x)[1].softmax(1) @ x),
    "rows as rows": (
        lambda: nn.LSTM(WIDTH, WIDTH),
        lambda lstm, x: (lstm(x.transpose(0, 1))[0] - lstm(x.transpose(0, 1))[1][0]).transpose(
            0, 1
        ),
    ),
    "times first, with a mask": (
        lambda: nn.MultiheadAttention(WIDTH, 2),
        lambda layer, x: x + layer(*[x.transpose(0, 1)] * 3, x[:, :, 0] > 2)[0].mean(0)[:, None],
    ),
    "of folded rows": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda layer, x: layer(layer(x.flatten(0, 1)).softmax(-1)).view(x.shape).cumsum(1),
    ),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("balance", [[3], [1, 1, 1], [2, 1]], ids=str)
def test_rows_apart_after_a_layer(tracing: Tracing, name: str, balance: list[int]) -> None:
    layer, function = KEPT[name]
    plain = States(layer(), function)

    assert_same_run(tracing(plain, balance), plain, rows(7 * 3).view(7, 3, WIDTH))


def watches(model: Model, x: Tensor) -> Tensor:
    x = x * 2
    x.register_hook(torch.Tensor.double)
    x.retain_grad()
    return x


def test_hooks_between_layers(tracing: Tracing) -> None:
    """A trial without gradients cannot have them: "across the rows", said the error."""
    plain = Model(watches)

    assert_same_run(tracing(plain, 2), plain, rows())


def matrices_of_rows(model: Model, x: Tensor) -> Tensor:
    y = x.unsqueeze(2)
    y = (
        torch.cdist(y, y).tril()
        + x.new_ones(x.size(0), 1, 1)
        + torch.cdist(x, x.new_ones(2, WIDTH)).sum(1)[:, None, None]
    )
    z = torch.bmm(x.expand(2, -1, WIDTH), x.new_ones(2, WIDTH, WIDTH)).sum(0)
    return x + y.sum(2) + F.avg_pool1d(x[:, None], 3, 1, 1)[:, 0] + z


def within_rows(model: Model, x: Tensor) -> Tensor:
    y = torch.stack([x, x.flip(1)]).unbind(0)[1].unsqueeze(1).transpose(1, 2).softmax(-1)
    z = x.view(x.size(0), 2, -1).permute(1, 0, 2)
    y = y + torch.einsum("hnc,hnc->nhc", z, z).flatten(1).unsqueeze(-1)
    y = y[..., 0] + x[:, None][:, 0] + x[torch.arange(x.size(0)), :1].mean(-1, keepdim=True)
    return y + torch.where(x > 0, x, -x).sum(1, keepdim=True) + x.roll(1, 1) + model.pair(x)[0]


@pytest.mark.parametrize("between", [within_rows, matrices_of_rows])
def test_computations_within_rows(tracing: Tracing, between: Callable[..., Any]) -> None:
    plain = Model(between)
    plain.pair = Pair(several=True)

    assert_same_run(tracing(plain, 2), plain, rows())


class Scaled(nn.Module):
    """Has blocks that scale what they get by two other arguments, and view it by its own shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * one
            x = x * other + x.flip(-1)
            rows, width = x.shape
            x = layer(x).view(rows, 2, width // 2).flip(1).reshape(-1, width)
        return x


@pytest.mark.parametrize("stages", [2, 4])
def test_shapes_of_what_another_stage_has_made(tracing: Tracing, stages: int) -> None:
    """Of a value that may have several entries for each row, the sizes are not known either."""
    plain = Scaled()

    assert_same_run(tracing(plain, stages), plain, rows(), rows()[:, :1] + 2, rows() + 3)


class SequenceFirst(nn.Module):
    """Moves the rows to dim 1 and takes the mean over the sequence, in dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(x.size(0), 1, -1).transpose(0, 1))
        return self.second(x.mean(0) + x[0])


def test_rows_in_another_dim_between_layers(tracing: Tracing) -> None:
    plain = SequenceFirst()

    assert_same_run(tracing(plain, 2), plain, rows())


class Inner(nn.Module):
    """Does between two layers of its own what cannot be traced."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.between = between
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.between(self, self.one(x)))


class Outer(nn.Module):
    """Calls a module that cannot be traced between two layers."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner(between)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def per_row(model: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 if float(row.sum().detach()) > 0 else row for row in x])


def test_module_that_cannot_be_traced_is_one_layer(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Outer(per_row)

    assert TracedForward(plain, "").units == ["first", "inner", "last"]
    assert_same_run(tracing(plain, [1, 2]), plain, rows())


def test_module_that_changes_its_attributes_is_one_layer() -> None:
    model = Outer(counts)

    assert TracedForward(model, "").units == ["first", "inner", "last"]
    assert model.inner.steps == 0


def test_grad_mode_within_a_forward(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Modes()

    assert_same_run(tracing(plain, [2, 1]), plain, rows())


def test_assertion_within_a_forward(tracing: Tracing) -> None:
    with pytest.raises(AssertionError, match="does not hold"):
        tracing(Modes(), [2, 1])(rows().unsqueeze(0))


class Edits(nn.Module):
    """Edits values in place."""

    def __init__(self, edit: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.edit = edit
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.edit(self, x)


def edit_of_an_earlier_value(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    a += b
    c = model.layers[2](a)
    return model.layers[3](c) + a


def edit_by_index(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    a[:, 0] = b[:, 1]
    return model.layers[3](model.layers[2](b) + a) * a


def edit_by_a_layer(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    b = model.layers[1](a * 1)
    model.relu(a)
    return model.layers[3](model.layers[2](b)) * a


def edit_of_a_view(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    a[:, 0].mul_(2)
    b = model.layers[1](a * 1)
    return model.layers[3](model.layers[2](b)) * a


@pytest.mark.parametrize(
    "edit",
    [edit_of_an_earlier_value, edit_by_index, edit_by_a_layer, edit_of_a_view],
    ids=lambda edit: edit.__name__,
)
@pytest.mark.parametrize("split", [1, 2, 3])
def test_edits_in_place(tracing: Tracing, edit: Callable[..., Any], split: int) -> None:
    torch.manual_seed(0)
    plain = Edits(edit)
    count = len(TracedForward(plain, "").units)

    assert_same_run(tracing(plain, [split, count - split]), plain, rows())


def edit_of_a_view_elsewhere(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x)
    v = a[:, :2]
    b = model.layers[1](a * 1)
    v += 1
    return model.layers[3](model.layers[2](b)) * a


def test_edit_of_a_tensor_that_another_stage_has(tracing: Tracing) -> None:
    torch.manual_seed(0)
    plain = Edits(edit_of_a_view_elsewhere)

    with pytest.raises(TypeError, match="edited in place .*test_refusals.py:.*test_refusals.py:"):
        tracing(plain, [1, 3])
    assert_same_run(tracing(plain, [2, 2]), plain, rows())


def edit_and_use_of_what_travels(model: Any, x: Tensor) -> Tensor:
    a = model.layers[0](x) * 2
    v = a[:, :2]
    b = model.layers[1](x)
    v.mul_(3.0)
    return model.layers[3](model.layers[2](b)) + a


def test_edit_of_one_of_two_tensors_that_travel_apart(tracing: Tracing) -> None:
    """The error named one stage twice, and no other."""
    plain = Edits(edit_and_use_of_what_travels)
    expected = (
        r"edits, on stage 1, a tensor from stage 0, and .* uses, on stage 1, another one from "
        "stage 0"
    )

    with pytest.raises(TypeError, match=expected):
        tracing(plain, [1, 3])
    assert_same_run(tracing(plain, [2, 2]), plain, rows())
