"""Models whose modules are a chain: what one returns comes into the next by the user's code."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import (
    SCHEDULES,
    ActivationCheckpointing,
    Block,
    ByMicroBatch,
    folded,
    looped,
)
from tests.support.blocks import drawn_block

WIDTH = 4
Kind = Literal["sequential", "loop", "traced"]
NAMES = ("encoder", "decoder", "last")  # the modules, in the order of their calls


@dataclass(frozen=True)
class Chain:
    """A model, how it is cut, and how it runs.

    Attributes:
        kinds: The kind of each module.
        balances: The balance of each.
        trained: Whether the code between two modules has a parameter.
        memory: Whether layers of a later module get what the one before has returned, beside what
            the first one got.
        residual: Whether the loss has what the first module returned, too.
        tied: Whether layers of two modules have one weight.
        frozen: Whether the first module is not trained.
        penalty: Whether the loss has one on the parameters of all layers.
        dropout: The share that layers drop; the code between them draws then, too.
    """

    kinds: tuple[Kind, ...]
    balances: tuple[tuple[int, ...], ...]
    devices: int
    schedule: ByMicroBatch | Block
    rows: int = 7
    chunks: int = 3
    mode: ActivationCheckpointing = "never"
    split: bool = False
    threads: bool = True
    trained: bool = True
    memory: bool = False
    residual: bool = False
    tied: bool = False
    frozen: bool = False
    penalty: bool = False
    weighted: bool = False
    dropout: float = 0.0
    seed: int = 0

    def build(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(self).double()

    def pipe(self, model: Model, **options: Any) -> GPipe:
        n = sum(map(len, self.balances))
        units = [2 if kind == "traced" else 1 for kind in self.kinds]  # in a layer
        balances = zip(units, self.balances, strict=True)
        return GPipe(
            model,
            [[k * size for size in balance] for k, balance in balances],
            module=NAMES[: len(self.kinds)],
            devices=["cpu"] * self.devices,
            chunks=self.chunks,
            activation_checkpointing=self.mode,
            split_backward=self.split,
            threads=self.threads,
            chained=True,
            folded=n == 2 * self.devices and is_folded_block(self),
            **options,
        )

    def batch(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + seed)
        return torch.randn(self.rows, WIDTH, generator=generator, dtype=torch.float64)


def is_folded_block(case: Chain) -> bool:
    schedule = case.schedule
    if isinstance(schedule, str):
        return SCHEDULES[schedule].folded
    return len(schedule) == 2 * case.devices


class Layer(nn.Module):
    """Takes a tensor, or one with the memory in a tuple, which it returns as it came."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any, memory: Tensor | None = None) -> Any:
        paired = isinstance(x, tuple)
        if paired:
            x, memory = x
        y = self.dropout(self.linear(x).tanh())
        y = x + (y if memory is None else y * memory)
        return (y, memory) if paired else y


class Traced(nn.Module):
    """Calls its layers one by one."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) if memory is None else layer(x, memory)
        return x


class Model(nn.Module):
    """Some modules, and what is before, between and after them."""

    encoder: Any
    decoder: Any

    def __init__(self, case: Chain) -> None:
        super().__init__()
        self.case = case
        self.enter = nn.Linear(WIDTH, WIDTH)
        for name, kind, balance in zip(NAMES, case.kinds, case.balances, strict=False):
            self.add_module(name, self._made(kind, sum(balance)))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        if case.tied:
            self._layers(1)[-1].linear.weight = self._layers(0)[0].linear.weight
        if case.frozen:
            self.encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        entered = self.enter(x)
        first = y = self._run(0, entered)
        for k in range(1, len(case.kinds)):
            y = self.between(y) if case.trained else y * 1.5
            if case.dropout:
                y = y * (1 + 0.1 * torch.rand((), dtype=y.dtype))
            y = self._run(k, entered, y) if case.memory else self._run(k, y)
        output: Tensor = self.head(y)
        return output + first[:, :2] if case.residual else output

    def step(self, x: Tensor) -> dict[str, Any]:
        """The loss of some rows: a mean, whose gradient differs from row to row."""
        output = self(x)
        loss = (output.tanh() ** 2 + output.sin()).mean()
        if self.case.penalty:
            weights = (p for k in range(len(self.case.kinds)) for p in self._module(k).parameters())
            loss = loss + 0.01 * sum((p**2).sum() for p in weights)
        found = {"loss": loss, "output": output}
        return found | ({"loss_weight": len(x)} if self.case.weighted else {})

    def _made(self, kind: Kind, layers: int) -> nn.Module:
        dropout = self.case.dropout
        if kind == "traced":
            return Traced(layers, dropout)
        made = [Layer(dropout) for _ in range(layers)]
        return nn.Sequential(*made) if kind == "sequential" else nn.ModuleList(made)

    def _module(self, k: int) -> Any:
        return getattr(self, NAMES[k])

    def _layers(self, k: int) -> Any:
        module = self._module(k)
        return module.layers if isinstance(module, Traced) else module

    def _run(self, k: int, x: Tensor, memory: Tensor | None = None) -> Tensor:
        module, kind = self._module(k), self.case.kinds[k]
        if kind == "loop":
            for layer in module:
                x = layer(x, memory=memory)
            return x
        if kind == "sequential" and memory is not None:
            return module((x, memory))[0]
        return module(x) if memory is None else module(x, memory)


@st.composite
def chains(draw: st.DrawFn, *, dropout: bool = False) -> Chain:
    devices = draw(st.integers(2, 4))
    modules = draw(st.integers(2, 3))
    turns = draw(st.sampled_from([1, 2] if devices * 2 >= modules else [2]))
    n = devices * turns
    modules = min(modules, n)
    starts = sorted(
        draw(st.sets(st.integers(1, n - 1), min_size=modules - 1, max_size=modules - 1))
    )
    sizes = [draw(st.integers(1, 2)) for _ in range(n)]
    balances = tuple(
        tuple(sizes[begin:end]) for begin, end in zip([0, *starts], [*starts, n], strict=True)
    )
    seed, split = draw(st.integers(0, 2**16)), draw(st.booleans())
    folds = turns == 2 and draw(st.booleans())
    schedule: ByMicroBatch | Block
    if draw(st.integers(0, 3)) == 0 and (turns == 1 or folds):
        placement = folded(n, devices) if folds else looped(n, devices)
        schedule = drawn_block(placement, Random(seed), split=split)
    elif folds:
        schedule = draw(st.sampled_from([x for x in get_args(ByMicroBatch) if SCHEDULES[x].folded]))
    else:
        schedule = draw(st.sampled_from(["1f1b", "zero_bubble"] if turns == 1 else ["1f1b"]))
    interleaved = schedule == "1f1b" and turns == 2
    chunks = draw(st.integers(1, 6))
    return Chain(
        tuple(draw(st.sampled_from(get_args(Kind))) for _ in range(modules)),
        balances,
        devices,
        schedule,
        rows=draw(st.integers(devices * 2, 12)),
        chunks=-(-chunks // devices) * devices if interleaved else chunks,
        mode=draw(st.sampled_from(["never", "always", "except_last", 1])),
        split=split,
        threads=draw(st.booleans()),
        **{
            name: draw(st.booleans())
            for name in ("trained", "memory", "residual", "tied", "frozen", "penalty", "weighted")
        },
        dropout=0.3 if dropout else 0.0,
        seed=seed,
    )
