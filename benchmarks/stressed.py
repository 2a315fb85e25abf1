"""The drawn models of stress.py: how they are built, run and compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from lightning_gpipe.core.skip.declare import Namespace, isolate, with_skips

CHANNELS, SIDE = 4, 5
STEPS_OF_A_MODEL = 8
MODES: list[ActivationCheckpointing] = ["always", "except_last", "never", 1]


@with_skips(stash=["kept"])
class Keep(nn.Module):
    """Keeps its input for a later layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x.sin(), {"kept": x}


@with_skips(pop=["kept"])
class Join(nn.Module):
    """Adds what was kept."""

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x + 0.5 * kept


class Convolution(nn.Conv2d):
    """Keeps the shape."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, CHANNELS, 3, padding=1)


class Tied(Convolution):
    """Has the weight of all others of its kind."""

    weight: nn.Parameter


@dataclass(frozen=True)
class Case:
    """A model and a way to run it, which print."""

    layers: tuple[str, ...]
    balance: tuple[int, ...]
    devices: tuple[str, ...]
    chunks: int
    mode: ActivationCheckpointing
    deferred: bool
    side_stream: bool
    seed: int

    def build(self) -> nn.Sequential:
        """The layers in float64, always the same."""
        torch.manual_seed(self.seed)
        found: list[nn.Module] = []
        open_spaces: list[Namespace] = []
        tied: dict[str, nn.Parameter] = {}
        for word in self.layers:
            layer = LAYERS[word]()
            if isinstance(layer, Keep):
                open_spaces.append(Namespace())
                isolate(layer, open_spaces[-1])
            elif isinstance(layer, Join):
                isolate(layer, open_spaces.pop())
            elif isinstance(layer, Tied):
                layer.weight = tied.setdefault("weight", layer.weight)
            found.append(layer)
        return nn.Sequential(*found).double()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": Convolution,
    "tied": Tied,
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS, eps=0.1),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS, eps=0.1),
    "tanh": nn.Tanh,
    "in place": lambda: nn.ELU(inplace=True),
    "keep": Keep,
    "join": Join,
}


def draw(seed: int, device: str) -> Case:
    """A case, the same for the same seed; ``device`` is cpu or cuda."""
    generator = random.Random(seed)
    layers = words(generator)
    n = generator.randint(1, min(4, len(layers)))
    ends = sorted(generator.sample(range(1, len(layers)), n - 1))
    own = "cuda:0" if device == "cuda" else "cpu"
    places = [(own,), (own,) * n]
    if device == "cuda" and n > 1:
        places += [("cpu", own) * (n // 2)] if n % 2 == 0 else [(own, "cpu", own)]
    return Case(
        layers=layers,
        balance=tuple(end - start for start, end in pairwise([0, *ends, len(layers)])),
        devices=generator.choice(places),
        chunks=generator.randint(1, 6),
        mode=generator.choice(MODES),
        deferred=generator.random() < 0.5,
        side_stream=device == "cuda" and generator.random() < 0.5,
        seed=seed,
    )


def words(generator: random.Random) -> tuple[str, ...]:
    """Layers in which each skip connection that begins also ends, the last one first."""
    plain = [word for word in LAYERS if word not in ("keep", "join")]
    found, open_skips = ["convolution"], 0
    for _ in range(generator.randint(4, 12)):
        word = generator.choice([*plain, "keep", "keep", "join"])
        if word == "join" and not open_skips:
            word = "tied"
        if word == "in place":
            found.append("convolution")  # which does not need its output
        open_skips += (word == "keep") - (word == "join")
        found.append(word)
    return (*found, *["join"] * open_skips, "convolution")


class Difference(NamedTuple):
    """How far a tensor of a step is from what it must be, relative to its largest entry."""

    step: int
    name: str
    relative: float


def run(case: Case, steps: int, side: torch.cuda.Stream | None = None) -> Iterator[Difference]:
    """Take the steps both ways, on ``side`` if the case says so; compare all that they made."""
    module = case.build()
    plain = copy.deepcopy(module)
    pipeline = GPipe(
        module,
        case.balance,
        devices=case.devices,
        chunks=case.chunks,
        activation_checkpointing=case.mode,
        deferred_batch_norm=case.deferred,
    )
    try:
        batches = [batch_of(case, k) for k in range(steps)]
        splits = [pipeline.microbatching.split(x, case.chunks) for x in batches]
        found = list(pipelined(case, pipeline, batches, side if case.side_stream else None))
    finally:
        pipeline.close()
    for k, microbatches in enumerate(splits):
        for name, expected in alone(case, plain, microbatches).items():
            yield Difference(k, name, relative(found[k].pop(name), expected))
        assert not found[k], f"must be made by the plain module too: {list(found[k])}"


def batch_of(case: Case, step: int) -> Tensor:
    """On the CPU, of another number of rows in each step."""
    generator = torch.Generator().manual_seed(case.seed + step)
    rows = 2 + (case.seed + 5 * step) % 11
    return torch.randn(rows, CHANNELS, SIDE, SIDE, dtype=torch.float64, generator=generator)


def pipelined(
    case: Case, pipeline: GPipe, batches: list[Tensor], side: torch.cuda.Stream | None
) -> Iterator[dict[str, Tensor]]:
    """Everything that each step makes, where it was made; nothing waits for the device."""
    first, last = pipeline.stages[0].device, pipeline.stages[-1].device
    for x in batches:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            images = x.to(first, non_blocking=True).detach().requires_grad_()
            loss_of(pipeline(images).to(last)).backward()
            made = everything(case, pipeline, images)
            update(pipeline)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        yield made


def alone(case: Case, module: nn.Sequential, microbatches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The same of the plain module, micro-batch by micro-batch, as batch norms see them."""
    images = torch.cat(list(microbatches)).detach().requires_grad_()
    parts = images.split([len(each) for each in microbatches])
    loss_of(torch.cat([module(part.clone()) for part in parts])).backward()
    made = everything(case, module, images)
    update(module)
    return made


def loss_of(output: Tensor) -> Tensor:
    """Of the whole mini-batch: no mean of those of its parts."""
    output = output.tanh()  # a model may not drift to infinity
    return output.square().mean().sqrt() + output.mean(0).square().sum()


def everything(case: Case, module: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Gradients, and what else can be compared, by name: copies."""
    assert images.grad is not None
    made = {"gradient of the input": images.grad.clone()}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} must get a gradient"
        made[f"gradient of {name}"] = parameter.grad.clone()
        made[name] = parameter.detach().clone()
    if not case.deferred:  # the plain module has no deferred ones
        made |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return made


@torch.no_grad()
def update(module: nn.Module) -> None:
    """A step of SGD, and no gradients."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry; NaN if there is one."""
    assert expected.isfinite().all(), "must be a model with finite gradients"
    difference = (found.cpu() - expected).abs().max()
    return float(difference / expected.abs().max().clamp_min(1e-3))
