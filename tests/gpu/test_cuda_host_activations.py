"""Activations that wait on the host: the numbers of those on devices, in less memory.

What leaves, and when it comes back, is in ``host/waiting_activations``.
"""

from __future__ import annotations

import gc
import os
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.core.layout import Weights
from lightning_gpipe.core.run.host import waiting_activations
from lightning_gpipe.core.schedules import ActivationCheckpointing, OffloadActivations
from tests.gpu.models import GPU, ON_GPU, assert_same, batch, gradients, layers
from tests.support.device_memory import Limit
from tests.support.lightning_modules import Classifier, assert_same_weights, fitted
from tests.support.models import Call

pytestmark = ON_GPU

WIDE = 64
ROWS = 64  # of a micro-batch
SAVED = 8 * ROWS * WIDE  # bytes of what each layer saves for a micro-batch


def offloading(*layers: nn.Module) -> GPipe:
    """A pipeline on one GPU with a stage for each layer, none of which recomputes."""
    return GPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        devices=[GPU],
        chunks=4,
        activation_checkpointing="never",
        offload_activations=True,
    )


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_activations, "_SMALL", 0)


def tall(depth: int = 8) -> nn.Sequential:
    """Layers that save what they return, in float64."""
    return nn.Sequential(nn.Identity(), *(nn.Sigmoid() for _ in range(depth))).double()


def peak(pipeline: GPipe, chunks: int) -> float:
    """The most memory of a step beside its batch and outputs, in what a layer saves."""
    x = torch.randn(chunks * ROWS, WIDE, dtype=torch.float64, device=GPU, requires_grad=True)
    pipeline(x).sum().backward()
    torch.cuda.synchronize(GPU)
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    pipeline(x).sum().backward()
    torch.cuda.synchronize(GPU)
    return (torch.cuda.max_memory_allocated(GPU) - before) / SAVED


@pytest.mark.parametrize("mode", ["never", "always"])
def test_memory_no_longer_grows_with_the_micro_batches(mode: ActivationCheckpointing) -> None:
    def run(chunks: int, offload: bool) -> float:
        # Stages of four layers; what they have in common with the next is kept, too.
        pipeline = GPipe(
            tall(),
            [5, 4],
            devices=[GPU],
            chunks=chunks,
            activation_checkpointing=mode,
            offload_activations=offload,
        )
        return peak(pipeline, chunks)

    kept, offloaded = (run(16, offload) - run(8, offload) for offload in (False, True))

    # Of 8 more micro-batches: outputs, gradients, and what is kept for each stage.
    assert offloaded <= kept - 8 * (6 if mode == "never" else 1)


def test_memory_falls_with_the_number_that_waits() -> None:
    """Eight micro-batches of a stage of eight layers; the last one has no time to leave."""

    def run(number: int) -> float:
        pipeline = GPipe(
            tall(),
            [9],
            devices=[GPU],
            chunks=8,
            activation_checkpointing="never",
            offload_activations=[number],
        )
        return peak(pipeline, 8)

    of_number = [run(k) for k in (0, 2, 4, 6, 9)]

    # Each that waits takes with it what its layers saved, but for its output.
    assert of_number[0] - of_number[1] >= 2 * 7
    assert of_number[1] - of_number[2] >= 2 * 7
    assert of_number[2] - of_number[3] >= 2 * 7 - 8  # another one comes meanwhile
    assert of_number[3] >= of_number[4]


@pytest.mark.skipif("SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger")
@pytest.mark.parametrize("room", [54, 66, 74, 86, 98])
def test_plan_moves_as_few_as_fit(limited: Limit, room: int) -> None:
    """A device with room for so many outputs of nine layers, of eight micro-batches."""
    model = nn.Sequential(nn.Linear(WIDE, WIDE), *tall(8)).double()
    plain = deepcopy(model)
    x = torch.randn(8 * ROWS, WIDE, dtype=torch.float64)
    gc.collect()
    limit = torch.cuda.memory_allocated(0) + room * SAVED
    limited(0, limit)
    # A plan uses nine tenths of the memory: for outputs, weights and gradients, and micro-batches.
    rest = 8 * SAVED + 2 * sum(p.nbytes for p in model.parameters())
    here = int((0.9 * limit - rest) // (9 * SAVED))

    pipeline = GPipe(
        model,
        [len(model)],
        devices=[GPU],
        chunks=8,
        activation_checkpointing="never",
        offload_activations="auto",
        sample=x,
    )
    for _ in range(2):
        pipeline(x.to(GPU)).sum().backward()
        plain(x).sum().backward()

    assert pipeline.plan is not None
    # Of those that wait, two are on the device too: the one at work, and the next one.
    waiting = [8 + 2 - here] if here < 8 else False
    assert pipeline.plan.settings.offload_activations == waiting
    assert_same(gradients(pipeline), gradients(plain))


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("mode", ["always", "except_last", "never", 2])
@pytest.mark.parametrize("split", [False, True])
def test_numbers_are_the_same_to_the_bit(
    mode: ActivationCheckpointing, split: bool, weights: Weights
) -> None:
    model = layers(nn.Dropout(0.3), nn.BatchNorm1d(32))

    def run(offload: OffloadActivations) -> list[Any]:
        torch.manual_seed(5)
        torch.cuda.manual_seed_all(5)
        pipeline = GPipe(
            deepcopy(model),
            [1, 3, 2, len(model) - 6],
            devices=[GPU, GPU if torch.cuda.device_count() < 2 else "cuda:1"],
            chunks=5,
            activation_checkpointing=mode,
            split_backward=split,
            weights=weights,
            offload_activations=offload,
        )
        x = batch(20).to(GPU).requires_grad_()
        losses = []
        for _ in range(2):
            loss = pipeline(x).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return [losses, x.grad, gradients(pipeline), dict(pipeline.named_buffers())]

    expected = run(False)

    torch.testing.assert_close(run(True), expected, rtol=0, atol=0)
    torch.testing.assert_close(run([3, 0, 1, 9]), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "schedule, stages", [("1f1b", 4), ("zero_bubble", 4), ("zero_bubble_v", 8)]
)
def test_loss_for_each_micro_batch(schedule: Any, stages: int) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(stages))).double()

    def run(**options: Any) -> list[Any]:
        pipeline = GPipe(
            deepcopy(model),
            [1] * stages,
            devices=[f"cuda:{k}" for k in range(4)],
            chunks=8,
            folded=schedule == "zero_bubble_v",
            activation_checkpointing="never",
            **options,
        )
        x = batch(16).to(pipeline.layout.outside)
        outcome = pipeline.by_micro_batch(
            lambda x: pipeline(x).square().mean(), x, schedule=schedule
        )
        assert outcome.loss is not None
        outcome.loss.backward()
        return [outcome.loss.detach(), gradients(pipeline)]

    expected = run()

    for offload in (True, [2, 1] * (stages // 2)):
        torch.testing.assert_close(run(offload_activations=offload), expected, rtol=0, atol=0)


class Edits(nn.Module):
    """Edits what it has given to an operator that saves it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y


def test_edit_of_what_is_saved() -> None:
    pipeline = offloading(nn.Linear(8, 8), Edits(), nn.Linear(8, 8))
    output = pipeline(torch.randn(8, 8, device=GPU))

    with pytest.raises(RuntimeError, match="must not be edited between a forward and its backward"):
        output.sum().backward()


class _Forgets(torch.autograd.Function):
    """Saves what its backward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_what_is_saved_and_not_read() -> None:
    """It comes back, and its memory is given back before anybody has waited for it."""
    pipeline = offloading(nn.Linear(8, 8), Call(_Forgets.apply), nn.Linear(8, 8))

    pipeline(torch.randn(8, 8, device=GPU)).sum().backward()


def test_backward_that_comes_before_that_of_the_pipeline() -> None:
    class Keeps(nn.Linear):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x).sin().exp()
            return self.kept * 2

    first = Keeps(8, 8)
    pipeline = offloading(first, nn.Linear(8, 8), nn.Linear(8, 8))
    output = pipeline(torch.randn(8, 8, device=GPU))
    first.kept.sum().backward()

    with pytest.raises(RuntimeError, match="a tensor with a graph must be handed out"):
        output.sum().backward()


def test_hooks_of_the_user_decide() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.cpu()

    plain = layers()
    pipeline = GPipe(
        deepcopy(plain),
        [2, len(plain) - 2],
        devices=[GPU],
        chunks=4,
        activation_checkpointing="never",
        offload_activations=True,
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(GPU)):
        output = pipeline(batch().to(GPU))
    output.sum().backward()
    plain(batch()).sum().backward()

    assert packed
    assert_same(gradients(pipeline), gradients(plain))


def test_inputs_that_a_hook_has_kept_are_as_they_were() -> None:
    model = layers()
    kept: list[tuple[Tensor, Tensor]] = []
    model[2].register_forward_hook(lambda _, args, output: kept.append((args[0], args[0].clone())))
    pipeline = GPipe(
        model,
        [2, len(model) - 2],
        devices=[GPU],
        chunks=4,
        activation_checkpointing="always",
        offload_activations=True,
    )

    pipeline(batch().to(GPU)).sum().backward()

    assert len(kept) == 8  # forward and recomputation
    assert all(torch.equal(one, other) for one, other in kept)


@pytest.mark.filterwarnings("ignore:All 3 stages of the pipeline share one device")
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "1f1b", "activation_checkpointing": "never"}, {"weights": "host"}],
    ids=str,
)
def test_fit(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(**more: Any) -> L.Trainer:
        strategy = GPipeStrategy([2, 2, 2], chunks=4, **options, **more)
        return fitted(
            tmp_path, strategy, build=partial(Classifier, "adam"), accelerator="gpu", devices=1
        )

    assert_same_weights(run(offload_activations=True), run())
