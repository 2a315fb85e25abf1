"""Claim: balance by time finds the fastest cut, and what it says of a stage is what that takes.

Each layer of several models is measured by itself, twice. By the first measurement the layers are
cut in 2, 4 and 8 stages; by the second it is told how much slower the slowest stage is than in the
best cut there is. Beside it stand the cut by parameters, and what torchgpipe's solver makes of the
same measurement. Then two stages run on two cores, and what each takes by the timeline, forward and
backward of all micro-batches, is compared with what its layers were measured to take. Two more
models show the same for other front-ends: blocks in a traced forward, and a Llama of transformers,
whose forward loops over them.

Images are small, so that the models fit the machine. Times are those of the clock; ``--clock
computed`` takes what each thread has computed, for a machine that others use too.

    python -m benchmarks.balance
    python -m benchmarks.balance --models charlm,llama --clock computed

Slowest stage / best must be at most 1.10, measured / timeline between 0.85 and 1.15.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.harness import Options, Report, options
from benchmarks.models import amoebanetd, llama, resnet101, unet
from examples.char_lm import CharLM
from lightning_gpipe import GPipe, ModelProfile
from lightning_gpipe.core.balance import solve, stage_costs, sums_of
from lightning_gpipe.core.profile import meters
from lightning_gpipe.core.run.observe.clocks import HostClock

STAGES = (2, 4, 8)
CHUNKS = 4
WARM_UP = 2


@dataclass(frozen=True)
class Model:
    """A model, a mini-batch for it, and the path of what is cut."""

    model: nn.Module
    x: Tensor
    path: str | None = None


def images(rows: int, side: int) -> Tensor:
    return torch.randn(rows, 3, side, side)


class Written(nn.Module):
    """Calls layers one after another in a forward that has to be traced."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        for name, layer in layers.named_children():
            self.add_module(f"layer{name}", layer)

    def forward(self, x: Tensor) -> Tensor:
        """What the last layer makes."""
        for layer in self.children():
            x = layer(x)
        return x


class Logits(nn.Module):
    """A language model of transformers with one argument and one result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for every next token."""
        return self.model(input_ids=tokens).logits


def charlm() -> nn.Sequential:
    return CharLM(context=128, blocks=8, width=128).layers


def transformers_llama() -> nn.Module:
    """As large as the other Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=64,
            use_cache=False,
            pad_token_id=0,
        )
    )


MODELS: dict[str, Callable[[], Model]] = {
    "charlm": lambda: Model(charlm(), torch.randint(50, (32, 128))),
    "unet": lambda: Model(unet(5, 64), images(4, 64)),
    "amoebanetd": lambda: Model(amoebanetd(18, 208), images(8, 64)),
    "resnet101": lambda: Model(resnet101(), images(8, 96)),
    "llama": lambda: Model(llama(8, 192, 4, tokens=300), torch.randint(300, (32, 64)), "layers"),
    "traced": lambda: Model(Written(charlm()), torch.randint(50, (32, 128))),
    "transformers_llama": lambda: Model(
        Logits(transformers_llama()), torch.randint(300, (32, 64)), "model.model.layers"
    ),
    "tiny": lambda: Model(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))), torch.randn(16, 32)
    ),
}


def measured(each: Model) -> tuple[GPipe, ModelProfile]:
    """A pipeline of two stages by time, and the measurement that it was cut by."""
    pipeline = GPipe(
        each.model,
        "time",
        module=each.path,
        devices=["cpu"] * 2,
        chunks=CHUNKS,
        sample=each.x,
        activation_checkpointing="never",
        threads=True,
    )
    return pipeline, pipeline.profiles[0]


def torchgpipe_solver() -> Callable[[Sequence[float], int], list[int]] | None:
    """Its solver, if it is installed."""
    try:
        from torchgpipe.balance.blockpartition import solve as theirs
    except ModuleNotFoundError:
        return None
    return lambda costs, n: [len(part) for part in theirs(list(costs), n)]


def of_stages(pipeline: GPipe, x: Tensor, rounds: int) -> list[float]:
    """What a mini-batch takes each stage, by the timeline: the medians."""
    found = []
    for _ in range(WARM_UP + rounds):
        pipeline(x).square().mean().backward()
        pipeline.zero_grad()
        assert pipeline.timeline is not None, "a mini-batch has run"
        each = [0.0] * len(pipeline.balance)
        for span in pipeline.timeline.spans:
            each[span.action.j] += span.end - span.start
        found.append(each)
    return [median(times) for times in zip(*found[WARM_UP:], strict=True)]


def compare(name: str, each: Model, report: Report, rounds: int) -> None:
    """Add what was found for one model."""
    other, costs = measured(each)
    other.close()
    other.release()
    pipeline, again = measured(each)
    times, parameters = costs.times(), [layer.parameters for layer in costs.layers]
    ways: dict[str, Any] = {
        "time": lambda n: solve(times, n),
        "parameters": lambda n: solve(parameters, n),
    }
    if theirs := torchgpipe_solver():
        ways["torchgpipe"] = lambda n: theirs(times, n)
    worst = 0.0
    for n in (n for n in STAGES if n <= len(times)):
        best = max(sums_of(again.times(), solve(again.times(), n)))
        found = {way: max(sums_of(again.times(), cut(n))) / best for way, cut in ways.items()}
        worst = max(worst, found["time"])
        cells = [f"{found[way]:.3f}" if way in found else "" for way in report.columns[3:]]
        report.rows.append((name, f"{n}", f"{1e3 * CHUNKS * best:.1f}", *cells))

    predicted = [stage.time for stage in stage_costs(again, pipeline.balance, "never", "last")]
    taken = of_stages(pipeline, each.x, rounds)
    pipeline.close()
    report.target(f"{name}: slowest stage by time / best, at worst", worst, at_most=1.10)
    for j, (one, two) in enumerate(zip(predicted, taken, strict=True)):
        claim = f"{name}: stage {j}, measured layers / timeline"
        report.target(claim, one / two, at_least=0.85, at_most=1.15)


@contextmanager
def clock(given: Options) -> Iterator[None]:
    """Measure by the clock that was asked for, in a ``with`` block."""
    if given.clock == "wall":
        yield
        return
    mine = SimpleNamespace(perf_counter=time.thread_time)
    with (
        patch.object(meters, "time", mine),
        patch.object(HostClock, "now", lambda _: time.thread_time()),
    ):
        yield


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    names = ",".join(name for name in MODELS if name != "tiny")
    given = options("balance", __doc__, rounds=5, argv=argv, models=names, clock="wall")
    torch.set_num_threads(2)  # the two stages share them
    report = Report(
        given,
        f"Slowest stage of a cut / of the best one, measured again; {CHUNKS} micro-batches",
        columns=("", "stages", "best, ms", "time", "parameters", "torchgpipe"),
    )
    with clock(given):
        for name in given.models.split(","):
            torch.manual_seed(0)
            try:
                model = MODELS[name]()
            except ModuleNotFoundError as error:
                report.notes.append(f"{name}: {error.name} is not installed.")
                continue
            compare(name, model, report, given.rounds)
    report.publish()


if __name__ == "__main__":
    main()
