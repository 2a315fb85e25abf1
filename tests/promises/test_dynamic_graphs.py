"""Promise: what a layer does may differ from step to step, and from micro-batch to micro-batch.

Nothing is traced and no shape is remembered. Where a layer decides by what it sees of the batch,
it sees a micro-batch, so it is compared with the plain module run on each micro-batch by itself.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_gpipe.core.data.microbatch.rows import Rows
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan.recompute import Mode
from tests.support.models import (
    Attention,
    Call,
    assert_same,
    gradients,
    perceptron,
    rows,
    step,
)

W = 3
M = 3
MODES: list[Mode] = ["always", "except_last", "never", 1]

Pipe = Callable[..., GPipe]
Info = dict[str, Any]


@pytest.fixture(params=MODES, ids=str)
def piped(request: pytest.FixtureRequest) -> Iterator[Pipe]:
    """Makes a pipeline of a copy of a module, one layer in each stage."""
    pipelines: list[GPipe] = []

    def pipe(module: nn.Sequential, **more: Any) -> GPipe:
        n = len(module)
        more = {"balance": [1] * n, "devices": ["cpu"] * n, "chunks": M, **more}
        pipelines.append(GPipe(deepcopy(module), activation_checkpointing=request.param, **more))
        return pipelines[-1]

    yield pipe
    for pipeline in pipelines:
        pipeline.close()


class Mapped(nn.Module):
    """The plain module run on each micro-batch by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return Rows().merge([self.module(x) for x in Rows().split(batch, M)], batch)


def assert_same_steps(pipeline: GPipe, plain: nn.Module, batches: list[Any]) -> None:
    for batch in batches:
        for module in (pipeline, plain):
            module.zero_grad()
        actual, expected = step(pipeline, batch), step(plain, batch)
        inner = {name.removeprefix("module."): g for name, g in expected.gradients.items()}
        assert_same(actual._asdict(), expected._replace(gradients=inner)._asdict())


# Shapes.


def tokens(count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(5, (count, length), generator=generator)


def test_batches_and_sequences_of_every_size(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Embedding(5, W), Attention(W), nn.Linear(W, W)).double()
    sizes = [(7, 4), (7, 9), (2, 4), (1, 1), (12, 2), (7, 4)]

    assert_same_steps(piped(plain), plain, [tokens(*size) for size in sizes])


def test_images_of_every_size(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, W)),
    ).double()
    shapes = [(6, 2, 8, 8), (4, 2, 5, 7), (1, 2, 16, 2), (6, 2, 8, 8)]

    assert_same_steps(
        piped(plain),
        plain,
        [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes],
    )


def test_numbers_of_dimensions_that_differ(piped: Pipe) -> None:
    plain = perceptron(4)
    shapes: list[tuple[int, ...]] = [(7, W), (7, 2, W), (4, 2, 2, W), (7, W)]

    assert_same_steps(
        piped(plain),
        plain,
        [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes],
    )


def test_shapes_that_differ_between_training_and_evaluation(piped: Pipe) -> None:
    plain = perceptron(4)
    pipeline = piped(plain)

    for count in (8, 3, 11):
        assert_same_steps(pipeline, plain, [rows(count)])
        with torch.no_grad():
            for module in (plain.eval(), pipeline.eval()):
                module(rows(2 * count))
        assert_same(pipeline(rows(count + 1)), plain(rows(count + 1)))
        plain.train()
        pipeline.train()


def test_micro_batches_cut_to_their_longest_sequence(piped: Pipe) -> None:
    class Trim(nn.Module):
        """Cuts the padding off that all rows have; what follows works on fewer columns."""

        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int((x != 0).any(-1).sum(1).max())]

    torch.manual_seed(3)
    lengths = [5, 4, 5, 2, 1, 3, 3]
    batch = pad_sequence([rows(k, seed=k).detach() for k in lengths], batch_first=True)
    pool = Call(lambda x: x.sum(1))
    plain = nn.Sequential(Trim(), nn.Linear(W, W, bias=False), pool, nn.Linear(W, W)).double()

    assert_same_steps(piped(plain), plain, [batch, batch[3:], batch])


# Decisions.


class Deeper(nn.Module):
    """Runs its layer as often as the values that it sees tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.detach().abs().sum()) % 4):
            x = self.layer(x).tanh()
        return x


class Either(nn.Module):
    """One layer or another, by the values that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(W, W), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x.detach().sum() > 0)](x)


class Nothing(nn.Module):
    """Its input, or an output that belongs to no graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.detach().sum() > 0 else x.detach()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("build", [Deeper, Either, Nothing])
def test_decision_by_values(piped: Pipe, build: Callable[[], nn.Module], place: int) -> None:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)]
    layers[place] = build()
    plain = nn.Sequential(*layers).double()

    assert_same_steps(piped(plain), Mapped(plain), [rows(7, seed=seed) for seed in range(8)])


class Repeated(nn.Module):
    """Runs one layer and one batch norm a number of times, each time on its input."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(W, W)
        self.norm = nn.BatchNorm1d(W) if norm else nn.Identity()
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        runs = [self.norm(x * (k + 1)) + self.layer(x).sin() for k in range(self.times)]
        return sum(runs, start=x)


def set_times(module: nn.Module, times: int) -> None:
    for each in module.modules():
        if isinstance(each, Repeated):
            each.times = times


def test_layer_that_runs_an_inner_layer_a_number_of_times(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), Repeated(norm=False), Repeated(norm=False)).double()
    pipeline = piped(plain)

    for times in (1, 3, 0, 2):
        for module in (plain, pipeline):
            set_times(module, times)
        assert_same_steps(pipeline, plain, [rows(7)])
        assert ("1.layer.weight" in gradients(pipeline)) == (times > 0)


def test_batch_norm_that_runs_a_number_of_times(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(W, W), Repeated(norm=True), nn.Tanh()).double()
    pipeline = piped(plain)

    for times in (1, 3, 0, 2):
        for module in (plain, pipeline):
            set_times(module, times)
            step(module, rows(7))
        assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))
    assert pipeline.get_buffer("1.norm.num_batches_tracked") == 6


class NormsIfPositive(nn.Module):
    """A batch norm that only some micro-batches meet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x[0, 0] > 0 else x


def test_batch_norm_that_some_micro_batches_meet(piped: Pipe) -> None:
    plain = nn.Sequential(nn.Identity(), NormsIfPositive()).double()
    pipeline, x = piped(plain), rows(7).detach()
    x[:, 0] = torch.tensor([1, 1, 1, -1, -1, 1, 1])

    step(pipeline, x.requires_grad_())
    plain(x[[0, 1, 2, 5, 6]])

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))


# What travels with the activations.


@dataclass(frozen=True)
class Task:
    """Something that PyTorch knows nothing of."""

    name: str
    temperature: float


class Masked(nn.Module):
    """Attention that leaves out what the mask does; hands everything on."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked()

    def forward(self, xs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = xs
        return self.inner(x, mask), mask


def padded(count: int, length: int) -> tuple[Tensor, Tensor]:
    x = rows(count * length).detach().reshape(count, length, W).requires_grad_()
    kept = torch.arange(length) < torch.arange(1, count + 1).unsqueeze(1)
    return x, kept[:, None, :].expand(-1, length, -1)


def test_mask_through_all_stages(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(WithMask() for _ in range(4))).double()

    assert_same_steps(piped(plain), plain, [padded(7, 4), padded(5, 6), padded(1, 2)])


class Informed(nn.Module):
    """Works by the additional_info that comes with the activations, and adds to it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.linear = nn.Linear(W, W)
        self.inner = Masked()
        self.seen: list[Info] = []

    def forward(self, batch: tuple[Tensor, Info]) -> tuple[Tensor, Info]:
        x, info = batch
        self.seen.append(info)
        x = self.inner(x, info["mask"]) * info["weights"]["rows"][:, None]
        if info["causal"] is not None and self.k % 2 == 0:
            x = x.cumsum(1)
        x = self.linear(x) / info["task"].temperature + info["bias"]
        weights = {**info["weights"], "rows": info["weights"]["rows"].cos()}
        return x, {
            **info,
            "weights": weights,
            "depth": info["depth"] + 1,
            f"first {self.k}": x[:, 0],
        }


def additional_info(count: int) -> Info:
    x, mask = padded(count, 4)
    return {
        "mask": mask,
        "weights": {"rows": x[:, 0, :1].detach().requires_grad_(), "ids": torch.arange(count)},
        "bias": torch.tensor(0.5, dtype=torch.float64),  # of no row: all micro-batches get it
        "causal": True,
        "nothing": None,
        "depth": 0,
        "names": ("left", "right"),
        "task": Task("tagging", 2.0),
        "scale": 1.5,
    }


def test_additional_info_through_all_stages(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(Informed(k) for k in range(3))).double()
    pipeline = piped(plain)
    batches = [(padded(count, 4)[0], additional_info(count)) for count in (7, 4, 1)]

    assert_same_steps(pipeline, plain, batches)

    info = pipeline(batches[0])[1]
    assert info["depth"] == 3
    assert info["task"] is batches[0][1]["task"]
    assert info["names"] == ("left", "right")
    assert info["nothing"] is None
    assert_same(info["weights"]["ids"], torch.arange(7))


def test_additional_info_that_changes_from_step_to_step(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(Informed(k) for k in range(3))).double()
    x, info = padded(7, 4)[0], additional_info(7)
    changes: list[Info] = [
        {},
        {"causal": None},
        {"task": Task("parsing", 0.5)},
        {"more": torch.arange(7), "deep": [{"er": (1, None)}]},
        {"nothing": rows(7)},
        {},
    ]

    assert_same_steps(piped(plain), plain, [(x, {**info, **change}) for change in changes])


def test_info_of_one_micro_batch_is_not_seen_by_another(piped: Pipe) -> None:
    class Counting(nn.Module):
        """Changes the dict that it is given."""

        def forward(self, batch: tuple[Tensor, Info]) -> tuple[Tensor, Info]:
            x, info = batch
            info["count"] += 1
            return x * info["count"], info

    plain = nn.Sequential(nn.Identity(), Counting(), Counting())
    pipeline = piped(plain)

    for _ in range(2):
        info = {"count": 0}
        y, out = pipeline((rows(7), info))
        y.sum().backward()
        assert out["count"] == 2
        assert_same(y, rows(7) * 2)


# Structures.


class Tells(nn.Module):
    """Gives an auxiliary output in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, batch: Any) -> Any:
        x, others = batch if isinstance(batch, tuple) else (batch, [])
        y = self.linear(x).tanh()
        return (y, [*others, y.mean(1, keepdim=True)]) if self.training else y


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_auxiliary_outputs_in_training_only(piped: Pipe, first: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(Tells(), Tells(), Tells()).double()
    pipeline = piped(plain)

    for k in range(4):
        training = (k % 2 == 0) == (first == "training")
        for module in (plain, pipeline):
            module.train(training)
        assert_same_steps(pipeline, plain, [rows(7, seed=k)])
        with torch.no_grad():
            assert_same(pipeline(rows(5)), plain(rows(5)))
        assert isinstance(pipeline(rows(5)), tuple) == training


class Named(nn.Module):
    """Hands on a dict with names that change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.name = "y"

    def forward(self, x: Any) -> dict[str, Tensor]:
        x = sum(x.values()) if isinstance(x, dict) else x
        return {self.name: self.linear(x), **({"a": x.sin()} if self.name == "z" else {})}


def test_dicts_whose_keys_change(piped: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(Named(), Named(), Named()).double()
    pipeline = piped(plain)

    for name in ("y", "z", "b", "y"):
        for module in (plain, pipeline):
            for layer in module.children():
                assert isinstance(layer, Named)
                layer.name = name
        assert_same_steps(pipeline, plain, [rows(7)])


class Prepend(nn.Module):
    """Puts something before its input, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.does = True

    def forward(self, x: Tensor) -> Any:
        return (x.detach().sign(), x) if self.does else x


class EditLast(nn.Module):
    """Edits the last of its inputs in place, and gives it back."""

    def forward(self, xs: Any) -> Tensor:
        x = xs[-1] if isinstance(xs, tuple) else xs
        return x.mul_(2)


def test_edit_in_place_where_structures_differ(piped: Pipe) -> None:
    """0.1: edited inputs were known by their number, whatever the structure around them."""
    plain = nn.Sequential(nn.Linear(W, W), Prepend(), EditLast()).double()
    pipeline = piped(plain)

    for does in (True, False, True, False):
        for module in (plain, pipeline):
            (layer,) = (each for each in module if isinstance(each, Prepend))
            layer.does = does
        assert_same_steps(pipeline, plain, [rows(7)])


class Squash(nn.Module):
    """Edits its input in place in training, as nn.Dropout(inplace=True) does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh_() if self.training else x


def test_edit_in_place_in_training_only(piped: Pipe) -> None:
    """0.1: an edit was refused after an earlier run in eval mode, with gradients, made none."""
    plain = nn.Sequential(nn.Linear(W, W), Squash(), nn.Linear(W, W)).double()
    pipeline = piped(plain)

    for k in range(4):
        for module in (plain, pipeline):
            module.train(k % 2 == 1)
        assert_same_steps(pipeline, plain, [rows(7)])
