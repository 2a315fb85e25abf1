"""A grammar of LightningModules around pipelines of all front-ends.

A :class:`Part` is one pipeline: the same blocks as layers of an nn.Sequential, in a loop over an
nn.ModuleList, or in a forward that is traced. Between the calls of blocks are operators on the
other dims of rows, by the names of :data:`OPERATORS`. All is rowwise but :data:`MIXING`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.vocabulary import DRAWING, EPS, KINDS, T, W

# Layers of which a Trainer's step needs to know nothing.
LAYERS = {
    name: run
    for name, run in KINDS["sequence"].rowwise.items()
    if name not in ("masked", "captured", "loss terms", "turned")
}

# They make something else of micro-batches than of the batch. "momentum" edits what is trained.
MIXING_LAYERS = {name: run for name, run in KINDS["sequence"].mixing.items() if name != "momentum"}


class Extras(NamedTuple):
    """Parameters, a buffer and a layer that a forward uses between its blocks."""

    bias: Tensor
    positions: Tensor
    table: Tensor
    norm: nn.Module


Operator = Callable[[Tensor, Tensor, Extras], Tensor]  # of a value, the part's input, the extras


def _edited(x: Tensor, first: Tensor, extras: Extras) -> Tensor:
    x = x * 0.5
    x += first
    return x.mul_(extras.table)


def _filled(x: Tensor, first: Tensor, extras: Extras) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y + first


def _split(x: Tensor, first: Tensor, extras: Extras) -> Tensor:
    one, other = x.split([1, W - 1], -1)
    return torch.cat([other, one], dim=-1)


OPERATORS: dict[str, Operator] = {
    "nothing": lambda x, first, extras: x,
    "scaled": lambda x, first, extras: 0.9 * x + 0.1,
    "skip": lambda x, first, extras: x + first,
    "gate": lambda x, first, extras: x * torch.sigmoid(first),
    "bias": lambda x, first, extras: x + extras.bias,
    "positions": lambda x, first, extras: x + extras.positions[:, : x.size(1)],
    "buffer": lambda x, first, extras: x * extras.table,
    "norm": lambda x, first, extras: extras.norm(x),
    "edited": _edited,
    "filled": _filled,
    "split": _split,
    "softmax": lambda x, first, extras: x.softmax(-1) + x,
    "centred": lambda x, first, extras: x - x.mean(1, keepdim=True),
    "cumulative": lambda x, first, extras: x.cumsum(1),
    "turned": lambda x, first, extras: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda x, first, extras: x.permute(1, 0, 2).tanh().permute(1, 0, 2),
    "reordered": lambda x, first, extras: x[:, [1, 0, *range(2, T)]],
    "first token": lambda x, first, extras: x + x[:, :1],
    "flipped": lambda x, first, extras: x.flip(1),
    "detached": lambda x, first, extras: x + first.detach(),
    "where": lambda x, first, extras: torch.where(first > EPS, x, 0.3 * x),
    "attention": lambda x, first, extras: x + (x @ first.mT).softmax(-1) @ first,
    "einsum": lambda x, first, extras: torch.einsum("btw,w->btw", x, extras.bias) + x,
    "flattened": lambda x, first, extras: x.flatten(1).sin().unflatten(1, (T, W)),
    "tokens as rows": lambda x, first, extras: extras.norm(x.reshape(-1, W)).reshape(-1, T, W),
    "chosen": lambda x, first, extras: x.masked_fill(first > 1, 0.5),
    "rolled": lambda x, first, extras: x.roll(1, dims=1),
    "stacked": lambda x, first, extras: torch.stack([x, first], dim=1).mean(1),
    "normalised": lambda x, first, extras: F.layer_norm(x, (W,), extras.bias, None, EPS),
    "sized": lambda x, first, extras: x / x.shape[1],
    "new": lambda x, first, extras: x + torch.arange(W, dtype=x.dtype),
    "iterated": lambda x, first, extras: torch.stack([x[:, k] for k in range(T)], 1),
}
# Across the rows: refused between blocks, and computed as ever outside of them.
MIXING: dict[str, Operator] = {
    "row mean": lambda x, first, extras: x - x.mean(0),
    "row softmax": lambda x, first, extras: x.softmax(0),
    "row sum": lambda x, first, extras: x.cumsum(0),
    "row roll": lambda x, first, extras: x.roll(1, 0),
    "row flip": lambda x, first, extras: x.flip(0),
    "row norm": lambda x, first, extras: x / x.norm(),
    "first row": lambda x, first, extras: x + first[0],
    "row product": lambda x, first, extras: x + (x[:, 0] @ first[:, 0].t()).sum(1)[:, None, None],
    "row maximum": lambda x, first, extras: x - x.amax(0, keepdim=True),
    "row sort": lambda x, first, extras: x.sort(0).values,
    "row number": lambda x, first, extras: x / x.shape[0],
    "distances": lambda x, first, extras: x + torch.cdist(x[:, 0], first[:, 0]).mean(),
    "ones": lambda x, first, extras: x + (torch.ones(1, len(x)).to(x) @ x[:, 0])[:, None],
}


class Block(nn.Module):
    """Layers, with a mask and a number beside their tensor."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers, nn.Identity())  # a layer for a stage to begin with

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: float = 0.0) -> Tensor:
        y = self.layers(x) + shift
        return y if mask is None else y * mask


Call = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a block with a value and a mask

CALLS: dict[str, Call] = {
    "plain": lambda block, x, mask: block(x),
    "residual": lambda block, x, mask: x + block(x),
    "masked": lambda block, x, mask: block(x, mask),
    "by keyword": lambda block, x, mask: block(x=x, mask=mask, shift=0.5),
    "edited": lambda block, x, mask: (2 * block(x)).mul_(0.5),
}


@dataclass(frozen=True)
class Step:
    """A block: what comes before it, its layers, and how it is called, by name."""

    operator: str
    layers: str
    call: str


class Blocks(nn.Module):
    """Blocks that are called one after another, with operators before each."""

    table: Tensor

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.blocks = nn.ModuleList(
            Block((LAYERS | MIXING_LAYERS | DRAWING)[step.layers]()) for step in steps
        )
        self.bias = nn.Parameter(torch.linspace(-1, 1, W))
        self.positions = nn.Parameter(torch.linspace(-1, 1, T * W).view(1, T, W))
        self.register_buffer("table", torch.linspace(0.5, 1, W))
        # One for each: what is between two calls of a layer is not cut.
        self.norms = nn.ModuleList(nn.LayerNorm(W, EPS) for _ in steps)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first = x
        mask = torch.ones_like(x) if mask is None else mask
        for step, block, norm in zip(self.steps, self.blocks, self.norms, strict=True):
            extras = Extras(self.bias, self.positions, self.table, norm)
            x = (OPERATORS | MIXING)[step.operator](x, first, extras)
            x = CALLS[step.call](block, x, mask)
        return x


def _tie(module: nn.Module) -> None:
    """Share parameters of the same kind and shape."""
    first: dict[Any, nn.Parameter] = {}
    for owner in module.modules():
        if isinstance(owner, Blocks | nn.Linear | nn.LayerNorm):
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    key = type(owner), name, parameter.shape
                    owner._parameters[name] = first.setdefault(key, parameter)


@dataclass(frozen=True)
class Part:
    """A pipeline.

    Attributes:
        frontend: ``"sequential"``, ``"loop"`` or ``"traced"``.
        steps: Its blocks.
        starts: The blocks with which stages begin, but the first.
        named: Whether the balance has names, not numbers.
        tied: Whether linear layers of the same size, norms between blocks and parameters of all
            blocks are shared, also by stages.
    """

    frontend: str
    steps: tuple[Step, ...]
    starts: tuple[int, ...]
    named: bool
    tied: bool = False

    def build(self) -> nn.Module:
        module: nn.Module = Blocks(self.steps)
        if self.frontend == "sequential":
            module = nn.Sequential(*(Blocks((step,)) for step in self.steps))
        if self.tied:
            _tie(module)
        return module

    def run(self, module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return module(x) if self.frontend == "sequential" else module(x, mask)

    @property
    def path(self) -> str:
        """The path of what is piped, in the part's module."""
        return ".blocks" if self.frontend == "loop" else ""

    @property
    def balance(self) -> Any:
        """The argument for this part; the calls of layers in a trace are not counted here."""
        prefix = "blocks." if self.frontend == "traced" else ""
        if self.named or prefix:
            return [f"{prefix}{k}" for k in self.starts] or "parameters"
        return [end - start for start, end in pairwise((0, *self.starts, len(self.steps)))]


def parts(
    stages: int, operators: Sequence[str], layers: Sequence[str], frontends: Sequence[str]
) -> st.SearchStrategy[Part]:
    """Parts of so many stages, from these words."""
    step = st.builds(
        Step, st.sampled_from(operators), st.sampled_from(layers), st.sampled_from(sorted(CALLS))
    )

    @st.composite
    def part(draw: st.DrawFn) -> Part:
        steps = draw(st.lists(step, min_size=max(2, stages), max_size=max(5, stages)))
        start = st.integers(1, len(steps) - 1)
        starts = st.lists(start, min_size=stages - 1, max_size=stages - 1, unique=True)
        return Part(
            draw(st.sampled_from(frontends)),
            tuple(steps),
            tuple(sorted(draw(starts))),
            draw(st.booleans()),
            draw(st.booleans()),
        )

    return part()
