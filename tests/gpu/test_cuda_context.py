"""Random numbers, autocast, clocks and memory of stages on a CUDA device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import Kind
from tests.gpu.models import DEVICES, GPU, ON_GPU, WIDTH, assert_same, batch, gradients, layers
from tests.support.models import Recorder
from tests.support.pipes import Pipe
from tests.support.waiting import awaited

pytestmark = ON_GPU

# Random numbers.


def dropped(pipeline: GPipe, devices: list[str], seed: int, steps: int = 3) -> list[Any]:
    """The gradients of several steps after the generators were seeded."""
    torch.manual_seed(seed)
    found = []
    for _ in range(steps):
        pipeline.zero_grad()
        pipeline(batch().to(devices[0])).square().mean().backward()
        found.append(gradients(pipeline))
    return found


@pytest.mark.parametrize("devices", DEVICES)
def test_recomputation_drops_the_same(pipe: Pipe, devices: list[str]) -> None:
    module = nn.Sequential(nn.Dropout(0.3), *layers(nn.Dropout(0.5)), nn.Dropout(0.3))
    kept, recomputed = (
        pipe(module, devices=devices, chunks=4, mode=mode) for mode in ("never", "always")
    )

    expected = dropped(kept, devices, seed=3)
    found = dropped(recomputed, devices, seed=3)

    assert_same(found, expected)


@pytest.mark.parametrize("devices", DEVICES)
def test_dropout_follows_the_seed(pipe: Pipe, devices: list[str]) -> None:
    module = nn.Sequential(nn.Dropout(0.3), *layers(nn.Dropout(0.5)), nn.Dropout(0.3))

    one, same, other = (
        dropped(pipe(module, devices=devices, chunks=4), devices, seed) for seed in (3, 3, 4)
    )

    assert_same(same, one)
    name = next(iter(one[0]))
    assert not torch.allclose(one[0][name], other[0][name]), "the seed made no difference"
    assert not torch.allclose(one[0][name], one[1][name]), "the steps drew the same numbers"


# Autocast.


@pytest.mark.parametrize("mode, runs", [("always", 2), ("never", 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU]], ids=["one-worker", "two-workers"])
def test_autocast(pipe: Pipe, devices: list[str], dtype: torch.dtype, mode: Any, runs: int) -> None:
    def half() -> list[nn.Module]:
        return [nn.Linear(8, 8), Recorder(), nn.Tanh()]

    torch.manual_seed(0)
    plain = nn.Sequential(*half(), *half()).to(GPU)
    pipeline = pipe(plain, devices=devices, chunks=4, mode=mode)
    x = batch(12).float().to(GPU)

    for module in (plain, pipeline):
        with torch.autocast("cuda", dtype):
            y = module(x)
        assert y.dtype is dtype
        y.float().square().mean().backward()  # outside autocast, as PyTorch advises

    recorders = [layer for layer in pipeline.modules() if isinstance(layer, Recorder)]
    assert [each.seen for each in recorders] == [[dtype] * 4 * runs] * 2
    torch.testing.assert_close(gradients(pipeline), gradients(plain), rtol=2e-2, atol=2e-3)


# Clocks.


@pytest.mark.parametrize("devices", DEVICES)
def test_timeline(pipe: Pipe, devices: list[str]) -> None:
    pipeline = pipe(layers(), devices=devices, chunks=4, mode="always")
    n = max(2, len(devices))

    for _ in range(3):
        pipeline(batch(256).to(devices[0])).square().mean().backward()

    timeline = pipeline.timeline
    assert timeline is not None
    assert 0 <= timeline.bubble < 1
    kinds = [span.action.kind for span in timeline.spans]
    expected = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(expected, 4 * n)
    for w in range(len(devices)):
        spans = [span for span in timeline.spans if span.worker == w]
        assert all(span.start <= span.end for span in spans)
        assert all(before.end <= after.start + 1e-6 for before, after in pairwise(spans)), (
            "a worker did two things at once"
        )


# Memory.


def peak_of_a_step(pipeline: GPipe, x: Tensor) -> int:
    """The bytes at the peak of a step, above what is there between steps."""
    pipeline(x).square().mean().backward()  # allocates what stays, copies inputs to watch them
    pipeline.zero_grad()
    torch.cuda.synchronize(GPU)
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)

    pipeline(x).square().mean().backward()

    torch.cuda.synchronize(GPU)
    return torch.cuda.max_memory_allocated(GPU) - before


@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU]], ids=["one-worker", "two-workers"])
def test_recomputation_saves_memory(pipe: Pipe, devices: list[str]) -> None:
    # 24 activations of 2 MiB each; "always" keeps those of one micro-batch in 8, and the inputs
    # of the two stages.
    pairs = [[nn.Linear(256, 256), nn.Tanh()] for _ in range(12)]
    module = nn.Sequential(*(layer for pair in pairs for layer in pair))
    x = torch.randn(2048, 256, device=GPU)

    never, always = (
        peak_of_a_step(pipe(module, devices=devices, chunks=8, mode=mode), x)
        for mode in ("never", "always")
    )

    assert always < 0.75 * never


@pytest.mark.parametrize("devices", DEVICES)
def test_forward_without_backward_frees_everything(pipe: Pipe, devices: list[str]) -> None:
    pipeline = pipe(layers(nn.Linear(WIDTH, WIDTH)), devices=devices, chunks=4)
    x = batch(4096).to(devices[0])
    pipeline(x).sum().backward()
    pipeline.zero_grad()
    torch.cuda.synchronize(GPU)
    before = torch.cuda.memory_allocated(GPU)

    for _ in range(3):
        pipeline(x)
    torch.cuda.synchronize(GPU)

    # A worker's thread may still hold the last output for a moment.
    assert awaited(lambda: torch.cuda.memory_allocated(GPU) <= before, True)
