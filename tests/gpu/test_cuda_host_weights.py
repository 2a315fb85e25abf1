"""Weights on the host: the numbers of weights on devices, in less memory than the model has.

What a worker moves, and when: ``host/weights``, ``host/side_copies``, ``host/memory`` and
``host/traffic``. A plan measures the way from the host with ``profile/meters``.
"""

from __future__ import annotations

import os
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpipe import GPipe, GPipeStrategy, StepInBackward
from lightning_gpipe.core.layout import Weights
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import GPU, ON_GPU, assert_same, batch, gradients, layers, on_host
from tests.gpu.trainers import needs
from tests.support.device_memory import Limit
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, assert_same_weights, fitted
from tests.support.vocabulary import Checkpointed

pytestmark = ON_GPU
TWO = needs(2)

SIDE = 128
STAGES = 16
STAGE = 8 * SIDE * (SIDE + 1)  # bytes of the parameters of one stage


def deep(stages: int = STAGES) -> nn.Sequential:
    """A Linear layer in float64 for each stage, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(stages))).double()


def steps(module: nn.Module, device: str, rows: int = 4, *, clip: bool = True) -> list[Any]:
    """The losses of some steps, with gradients of two mini-batches each, and the weights."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(rows, SIDE, dtype=torch.float64, generator=generator)
            loss = module(x.to(device)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, [p.detach().cpu() for p in module.parameters()]]


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.skipif("SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger")
def test_model_four_times_as_large_as_all_devices(
    limited: Limit, devices: int, mode: ActivationCheckpointing
) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    stages = (
        32 * devices
    )  # of which the devices have room for a quarter, less what they use already
    expected = steps(deep(stages), "cpu")

    for k in range(devices):
        limited(k, torch.cuda.memory_allocated(k) + stages * STAGE // (4 * devices))
    names = [f"cuda:{k}" for k in range(devices)]
    pipeline = GPipe(
        deep(stages),
        [1] * stages,
        devices=names,
        chunks=4,
        activation_checkpointing=mode,
        weights="host",
    )
    found = steps(pipeline, names[-1])

    assert_same(found, expected)
    with pytest.raises(torch.OutOfMemoryError):
        GPipe(deep(stages), [1] * stages, devices=names)


@pytest.mark.skipif("SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger")
def test_stage_that_does_not_fit(limited: Limit) -> None:
    pipeline = on_host(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 400), nn.Linear(400, 2))
    x = torch.randn(4, 2, device=GPU)
    limited(0, torch.cuda.memory_allocated(0) + 3000)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipeline(x)

    assert "raised in loading the weights of stage 2" in "".join(caught.value.__notes__)


CASES: dict[str, dict[str, Any]] = {
    "fill-drain": {},
    "split": {"split_backward": True},
    "never": {"activation_checkpointing": "never"},
    "always": {"activation_checkpointing": "always"},
    "inline": {"threads": False},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("devices", [[GPU], ["cuda:0", "cpu"], ["cuda:0", "cuda:1"]])
def test_numbers_are_those_of_weights_on_devices(
    devices: list[str], options: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < len(devices):
        pytest.skip("needs two GPUs")

    def run(**more: Any) -> list[Any]:
        pipeline = GPipe(deep(4), [1] * 4, devices=devices, chunks=3, **options, **more)
        # The norm of all gradients is added up device by device.
        return steps(pipeline, devices[-1], clip=False)

    found, expected = run(weights="host"), run()

    assert found[0][:2] == expected[0][:2]  # the optimizer's kernels on the host round in their way
    assert_same(found, expected)


@pytest.mark.parametrize(
    "schedule, devices",
    [("1f1b", 4), ("1f1b", 2), ("zero_bubble", 4), ("zero_bubble_v", 2)],
)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_loss_for_each_micro_batch(
    schedule: Any, devices: int, mode: ActivationCheckpointing
) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    names = [f"cuda:{k}" for k in range(devices)]
    around = nn.Linear(SIDE, SIDE).double()
    x = torch.randn(8, SIDE, dtype=torch.float64)
    torch.manual_seed(3)

    def run(**options: Any) -> list[Any]:
        pipeline = GPipe(
            deep(4),
            [1] * 4,
            devices=names,
            chunks=4,
            folded=schedule == "zero_bubble_v",
            activation_checkpointing=mode,
            **options,
        )
        outside = pipeline.layout.outside
        around.zero_grad()
        around.to(outside)
        outcome = pipeline.by_micro_batch(
            lambda x: around(pipeline(x)).square().mean(),
            x.to(outside),
            schedule=schedule,
            around=around,
        )
        assert outcome.loss is not None
        (2 * outcome.loss).backward()
        return [outcome.loss.detach(), gradients(pipeline), gradients(around)]

    assert_same(run(weights="host"), run())


def test_weights_come_twice_and_gradients_go_once(copied_bytes: dict[str, int]) -> None:
    pipeline = on_host(*deep(6))
    x = torch.randn(4, SIDE, dtype=torch.float64, device=GPU)

    pipeline(x).sum().backward()

    # The last two stages stay from forward to backward.
    assert copied_bytes == {"to the device": (2 * 6 - 2) * STAGE, "to the host": 6 * STAGE}
    copied_bytes["to the device"] = 0
    with torch.no_grad():
        pipeline(x)
    assert copied_bytes["to the device"] == 6 * STAGE


def test_everything_but_the_weights_is_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    pipeline = GPipe(model, [1, 2], devices=[GPU], chunks=2, weights="host")

    pipeline(torch.randn(8, 8, device=GPU)).sum().backward()

    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(p.is_pinned() for p in model.parameters())
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"cuda"}
    assert "weights on the host" in str(pipeline.layout)


def test_shared_and_frozen_weights() -> None:
    model = layers(nn.Linear(32, 32), nn.Linear(32, 32))
    model[3].weight = model[2].weight
    model[4].requires_grad_(False)
    plain, x = deepcopy(model), batch()
    pipeline = GPipe(model, [3, 1, 2, len(plain) - 6], devices=[GPU], chunks=4, weights="host")

    plain(x).square().sum().backward()
    pipeline(x.to(GPU)).square().sum().backward()

    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_same(one.grad, other.grad)


class Own(nn.Parameter):
    """A parameter whose class defines operators, and records them."""

    called: ClassVar[set[Any]] = set()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.add(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["always", "never"])
def test_weights_do_not_move_by_operators_of_their_class(mode: ActivationCheckpointing) -> None:
    model, plain = deep(4), deep(4)
    for layer in model:
        layer.register_parameter("weight", Own(layer.get_parameter("weight").detach()))
    pipeline = on_host(*model, activation_checkpointing=mode)
    x = torch.randn(4, SIDE, dtype=torch.float64)
    Own.called.clear()  # those of nn.Module.to

    pipeline(x.to(GPU)).square().sum().backward()
    plain(x).square().sum().backward()

    assert not Own.called & {Tensor.detach, Tensor.to, Tensor.copy_, torch.empty_like}
    assert nn.functional.linear in Own.called
    assert_same(gradients(model), gradients(plain))
    assert {type(layer.get_parameter("weight")) for layer in model} == {Own}


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("split", [False, True])
def test_layer_that_runs_again_in_backward(weights: Weights, split: bool) -> None:
    class Again(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False).sin()

    model = nn.Sequential(Again(8, 8), nn.Tanh(), Again(8, 8), Again(8, 8)).double()
    model[3].weight = model[0].weight
    plain, x = deepcopy(model), batch()
    pipeline = GPipe(
        model,
        [1, 1, 1, 1],
        devices=[GPU, GPU if torch.cuda.device_count() < 2 else "cuda:1"],
        chunks=2,
        activation_checkpointing=1,
        split_backward=split,
        weights=weights,
    )

    for _ in range(4):  # how backwards are split is found in the first ones
        plain(x).sum().backward()
        pipeline(x.to(GPU)).sum().backward()

    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize("weights", ["device", "host"])
def test_backwards_of_two_mini_batches_at_once(weights: Weights) -> None:
    """On one thread autograd may begin the second one while a layer of the first runs again."""
    layers = [Checkpointed(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    layers[2][0].weight = layers[0][0].weight
    model = nn.Sequential(*layers).double()
    plain = deepcopy(model)
    pipeline = GPipe(
        model,
        [1, 1, 1],
        devices=[GPU],
        chunks=3,
        threads=False,
        weights=weights,
    )
    for k in range(3):
        x, y = batch(8, seed=k), batch(5, seed=k + 9)
        (plain(x).square().sum() + plain(y).sin().sum()).backward()
        (pipeline(x.to(GPU)).square().sum() + pipeline(y.to(GPU)).sin().sum()).backward()

    assert_same(gradients(model), gradients(plain))


def test_gradients_that_the_user_asks_for() -> None:
    plain, model = deep(3), deep(3)
    x = torch.randn(4, SIDE, dtype=torch.float64)
    pipeline = on_host(*model)

    found = torch.autograd.grad(pipeline(x.to(GPU)).sum(), [*model.parameters()])

    assert_same(found, torch.autograd.grad(plain(x).sum(), [*plain.parameters()]))


def test_backward_that_comes_without_the_weights() -> None:
    class Keeps(nn.Linear):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x).sin()
            return self.kept * 2

    first = Keeps(8, 8)
    pipeline = on_host(first, nn.Linear(8, 8), nn.Linear(8, 8), activation_checkpointing="never")
    pipeline(torch.randn(4, 8, device=GPU, requires_grad=True))

    with pytest.raises(RuntimeError, match="weights are on the device only while"):
        first.kept.sum().backward()


def test_tensors_that_layers_keep_of_weights_stay_as_they_are() -> None:
    class Keeps(nn.Linear):
        turned: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.turned = self.weight.detach().t()
            return super().forward(x)

    first = Keeps(8, 8)
    pipeline = on_host(first, nn.Linear(8, 8), nn.Linear(8, 8))

    pipeline(torch.randn(4, 8, device=GPU)).sum().backward()

    assert torch.equal(first.turned.cpu(), first.weight.detach().t())


@pytest.mark.parametrize("way", ["in place", "by its data", "other data"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_edit_of_a_weight_in_forward(stages: int, way: str, mode: ActivationCheckpointing) -> None:
    class Edits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if way == "other data":
                self.weight.data = 2 * self.weight.data
            else:
                with torch.no_grad():
                    (self.weight if way == "in place" else self.weight.data).mul_(2)
            return super().forward(x.detach())

    others = (nn.Linear(8, 8) for _ in range(stages))
    pipeline = on_host(Edits(8, 8), *others, activation_checkpointing=mode)

    with pytest.raises(RuntimeError, match=r"must not be .* layer 0\.weight"):
        pipeline(torch.randn(4, 8, device=GPU))


def test_balance_may_change() -> None:
    plain, model = deep(4), deep(4)
    pipeline = GPipe(model, [1, 3], devices=[GPU], chunks=2, weights="host")
    first = steps(pipeline, GPU)
    pipeline.rebalance([2, 2])

    found = [first, steps(pipeline, GPU)]

    assert_same(found, [steps(plain, "cpu"), steps(plain, "cpu")])
    assert "weights on the host" in str(pipeline.layout)


def test_unknown_place() -> None:
    with pytest.raises(ValueError, match="weights must be 'device' or 'host'.*got 'disk'"):
        GPipe(deep(2), [1, 1], devices=[GPU], weights="disk")  # type: ignore[arg-type]  # the error


class Deeper(Classifier):
    """More stages than devices."""

    def __init__(self, optimizer: str = "momentum", scheduled: bool = False) -> None:
        widths = [FEATURES, *[WIDTH] * 7]
        pairs = [[nn.Linear(widths[k], WIDTH), nn.Tanh()] for k in range(8)]
        stack = nn.Sequential(*(layer for pair in pairs for layer in pair))
        super().__init__(optimizer, scheduled, layers=stack)


@pytest.mark.filterwarnings("ignore:All 8 stages of the pipeline share one device")
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "momentum"},
        {"optimizer": "adam", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        {"optimizer": "adam", "precision": "16-mixed"},
        {"optimizer": "adam", "precision": "bf16-mixed"},
    ],
    ids=str,
)
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO)])
def test_fit(tmp_path: Path, gpus: int, options: dict[str, Any]) -> None:
    options = dict(options)
    build = partial(Deeper, options.pop("optimizer"))

    def run(**more: Any) -> L.Trainer:
        strategy = GPipeStrategy([2] * 8, chunks=3, **more)
        return fitted(tmp_path, strategy, build=build, accelerator="gpu", devices=gpus, **options)

    assert_same_weights(run(weights="host"), run())


@pytest.mark.filterwarnings("ignore:All 8 stages of the pipeline share one device")
@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO)])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_fit_with_steps_in_backward(tmp_path: Path, gpus: int, accumulated: int) -> None:
    def run(*callbacks: L.Callback, **more: Any) -> L.Trainer:
        strategy = GPipeStrategy([2] * 8, chunks=3, **more)
        return fitted(
            tmp_path,
            strategy,
            build=partial(Deeper, "adam"),
            accelerator="gpu",
            devices=gpus,
            callbacks=[*callbacks],
            accumulate_grad_batches=accumulated,
        )

    assert_same_weights(run(StepInBackward(), weights="host"), run())
    with pytest.raises(ValueError, match="got weights on GPUs"):
        run(StepInBackward())


@pytest.mark.filterwarnings("ignore:All 8 stages of the pipeline share one device")
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_resumed_elsewhere(tmp_path: Path, schedule: Any) -> None:
    def run(epochs: int, path: Path | None = None, **more: Any) -> L.Trainer:
        strategy = GPipeStrategy([2] * 8, chunks=4, schedule=schedule, **more)
        return fitted(
            tmp_path,
            strategy,
            build=partial(Deeper, "adam"),
            accelerator="gpu",
            devices=1,
            max_epochs=epochs,
            ckpt_path=path,
        )

    path = tmp_path / "half.ckpt"
    run(1, weights="host").save_checkpoint(path)

    assert_same_weights(run(2, path), run(2, path, weights="host"))


@pytest.mark.skipif("SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("room, weights", [(4 * STAGES, "device"), (8, "host")])
def test_plan_fits(limited: Limit, devices: int, room: int, weights: Weights) -> None:
    """Each device has room for the parameters of so many stages, and as much for the rest."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    expected = steps(deep(), "cpu", 64)
    names = [f"cuda:{k}" for k in range(devices)]
    for k in range(devices):
        limited(k, torch.cuda.memory_allocated(k) + 2 * room * STAGE)

    pipeline = GPipe(
        deep(),
        "time",
        devices=names,
        chunks=8,
        activation_checkpointing="auto",
        weights="auto",
        offload_activations="auto",
        sample=torch.randn(64, SIDE, dtype=torch.float64),
        optimizer=torch.optim.AdamW,
    )
    found = steps(pipeline, names[-1], 64)

    assert pipeline.plan is not None
    assert pipeline.layout.weights == pipeline.plan.settings.weights == weights
    assert_same(found, expected)


class Wide(Classifier):
    """A model whose weights, with gradients and states, are larger than its activations."""

    def __init__(self, optimizer: str = "adam", scheduled: bool = False) -> None:
        widths = [FEATURES, *[64] * 7, WIDTH]
        layers = (layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh()))
        super().__init__(optimizer, scheduled, layers=nn.Sequential(*layers))


@pytest.mark.skipif("SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger")
def test_fit_with_a_plan_for_less_memory(
    tmp_path: Path, limited: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    """The device has room for three quarters of weights, gradients and optimizer states."""

    def run(*balance: Any, **options: Any) -> L.Trainer:
        strategy = GPipeStrategy(*balance, **options)
        return fitted(tmp_path, strategy, build=Wide, accelerator="gpu", devices=1)

    expected = run([16], chunks=4)
    size = sum(parameter.nbytes for parameter in Wide().parameters())
    limited(0, torch.cuda.memory_allocated(0) + 3 * size)

    with pytest.raises(torch.OutOfMemoryError):
        run([16], chunks=4)
    found = run("time", chunks="auto", activation_checkpointing="auto", weights="auto")

    assert "weights='host'" in caplog.text
    assert_same_weights(found, expected)
