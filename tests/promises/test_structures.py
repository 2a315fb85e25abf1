"""Transparency: stages may pass any nested value, with another structure in every step.

Tensors, masks, numbers and objects that are not PyTorch's are passed with the activations; tensors
with rows are split and merged, and other values go to every micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Interval, assert_same, assert_same_steps, rows
from tests.support.pipes import Pipe, every_mode

pytestmark = every_mode

W = 3
Info = dict[str, Any]


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


class Widen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Interval) -> Interval:
        return Interval(low=x.low, high=self.linear(x.high))


@pytest.mark.parametrize("low", [None, rows(5, seed=8)])
def test_class_registered_without_names(pipe: Pipe, low: Tensor | None) -> None:
    """A ValueError of PyTorch, if it held anything but tensors."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(Widen() for _ in range(4))).double()
    x = Interval(low=low, high=rows(5))

    assert_same(pipe(plain)(x), plain(x))


def test_mask_through_all_stages(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(WithMask() for _ in range(4))).double()

    assert_same_steps(
        pipe(plain, stages=len(plain)), plain, [padded(7, 4), padded(5, 6), padded(1, 2)]
    )


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


def test_additional_info_through_all_stages(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(Informed(k) for k in range(3))).double()
    pipeline = pipe(plain, stages=len(plain))
    batches = [(padded(count, 4)[0], additional_info(count)) for count in (7, 4, 1)]

    assert_same_steps(pipeline, plain, batches)

    info = pipeline(batches[0])[1]
    assert info["depth"] == 3
    assert info["task"] is batches[0][1]["task"]
    assert info["names"] == ("left", "right")
    assert info["nothing"] is None
    assert_same(info["weights"]["ids"], torch.arange(7))


def test_additional_info_that_changes_from_step_to_step(pipe: Pipe) -> None:
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

    assert_same_steps(
        pipe(plain, stages=len(plain)), plain, [(x, {**info, **change}) for change in changes]
    )


def test_info_of_one_micro_batch_is_not_seen_by_another(pipe: Pipe) -> None:
    class Counting(nn.Module):
        """Changes the dict that it is given."""

        def forward(self, batch: tuple[Tensor, Info]) -> tuple[Tensor, Info]:
            x, info = batch
            info["count"] += 1
            return x * info["count"], info

    plain = nn.Sequential(nn.Identity(), Counting(), Counting())
    pipeline = pipe(plain, stages=len(plain))

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
def test_auxiliary_outputs_in_training_only(pipe: Pipe, first: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(Tells(), Tells(), Tells()).double()
    pipeline = pipe(plain, stages=len(plain))

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


def test_dicts_whose_keys_change(pipe: Pipe) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(Named(), Named(), Named()).double()
    pipeline = pipe(plain, stages=len(plain))

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


def test_edit_in_place_where_structures_differ(pipe: Pipe) -> None:
    """Once edited inputs were known by position in any structure, so the wrong one was copied."""
    plain = nn.Sequential(nn.Linear(W, W), Prepend(), EditLast()).double()
    pipeline = pipe(plain, stages=len(plain))

    for does in (True, False, True, False):
        for module in (plain, pipeline):
            (layer,) = (each for each in module if isinstance(each, Prepend))
            layer.does = does
        assert_same_steps(pipeline, plain, [rows(7)])


class Squash(nn.Module):
    """Edits its input in place in training, as nn.Dropout(inplace=True) does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh_() if self.training else x


def test_edit_in_place_in_training_only(pipe: Pipe) -> None:
    """Once a run in eval mode, which edits nothing, decided for all: an edit was refused."""
    plain = nn.Sequential(nn.Linear(W, W), Squash(), nn.Linear(W, W)).double()
    pipeline = pipe(plain, stages=len(plain))

    for k in range(4):
        for module in (plain, pipeline):
            module.train(k % 2 == 1)
        assert_same_steps(pipeline, plain, [rows(7)])
