"""Quantised weights on the host: they come and go with their scales, and adapters on them train."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_gpipe import GPipe
from lightning_gpipe.core.faithful import parts_of
from lightning_gpipe.core.layout import Weights
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import GPU, ON_GPU, assert_same, on_host
from tests.support.device_memory import Limit
from tests.support.quantised import Adapted, OfTwo, TakesScale, WithScale, quantised, scaled

pytestmark = ON_GPU

SIMULATED = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="a GPU's blocks are larger"
)
WIDTH = 128
QUANTISED = WIDTH * WIDTH + 8 * WIDTH  # bytes of integers, and of a scale for each row
ADAPTER = 2 * 8 * 2 * WIDTH

Kind = Callable[[nn.Linear], nn.Module]


class WithState(nn.Module):
    """Has an object with two levels of scales in an attribute of its weight, as in 4 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight: Any = scaled(linear.weight.detach())
        integers, factor = quantised(weight.scale)
        weight.state = SimpleNamespace(scale=integers, nested=SimpleNamespace(scale=factor))
        weight.scale, weight.module = None, self
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Dequantising.apply(x, self.weight, vars(self.weight)["state"])
        return out


class Dequantising(torch.autograd.Function):
    """A product with a weight that is whole only meanwhile."""

    @staticmethod
    def whole(weight: Tensor, state: Any) -> Tensor:
        return weight * (state.scale * state.nested.scale)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Any) -> Tensor:
        ctx.state = state
        ctx.save_for_backward(weight)
        return x @ Dequantising.whole(weight, state).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        [weight] = ctx.saved_tensors
        return gradient @ Dequantising.whole(weight, ctx.state), None, None


EDIT = r"got an edit of layer 0\.base\.weight or its attributes"
KINDS = [WithScale, OfTwo, WithState]


def adapted(kind: Kind, layers: int) -> nn.Sequential:
    """Adapters over quantised layers, always with the same weights."""
    torch.manual_seed(0)
    made = [Adapted(kind(nn.Linear(WIDTH, WIDTH).double()), WIDTH).double() for _ in range(layers)]
    return nn.Sequential(*made)


def steps(module: nn.Module, device: str, rows: int) -> list[Any]:
    """The losses of some steps of the adapters, and their weights."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
        loss = module(x.to(device)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [losses, [p.detach().cpu() for p in trained]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_one_device(kind: Kind, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def drawn(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=draw))

    gpus = min(drawn(1, 4), torch.cuda.device_count())
    balance = [drawn(1, 2) for _ in range(gpus * drawn(1, 3))]
    mode: ActivationCheckpointing = ("always", "except_last", "never")[drawn(0, 2)]
    rows, chunks = drawn(4, 12), drawn(1, 4)
    plain = adapted(kind, sum(balance))
    model = deepcopy(plain)
    weights = [p for p in model.parameters() if not p.requires_grad]
    pipeline = GPipe(
        model,
        balance,
        devices=[f"cuda:{k}" for k in range(gpus)],
        chunks=chunks,
        weights="host",
        activation_checkpointing=mode,
        split_backward=bool(drawn(0, 1)),
        threads=bool(drawn(0, 1)),
    )

    assert_same(steps(pipeline, f"cuda:{gpus - 1}", rows), steps(plain, "cpu", rows))

    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(one is other for one, other in zip(frozen, weights, strict=True))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(p.grad is None for p in frozen)
    parts = [part for p in frozen for part in parts_of(p)]
    assert len(parts) >= 2 * len(frozen)
    assert all(part.is_pinned() for part in parts)


@pytest.mark.parametrize("kind", [WithScale, OfTwo])
def test_weights_go_as_they_are(kind: Kind, copied_bytes: dict[str, int]) -> None:
    pipeline = on_host(*adapted(kind, 6))
    x = torch.randn(4, WIDTH, dtype=torch.float64, device=GPU)

    pipeline(x).sum().backward()

    # The last two stages stay from forward to backward.
    assert copied_bytes == {
        "to the device": (2 * 6 - 2) * (QUANTISED + ADAPTER),
        "to the host": 6 * ADAPTER,
    }


# With "never", autograd saves the whole weights of the others: these are activations.
@pytest.mark.parametrize(
    "kind, mode",
    [(WithScale, "always"), (OfTwo, "always"), (WithState, "always"), (WithState, "never")],
)
@SIMULATED
def test_model_larger_than_the_device(
    limited: Limit, kind: Kind, mode: ActivationCheckpointing
) -> None:
    stages = 64
    plain = adapted(kind, stages)
    pipeline = on_host(*deepcopy(plain), chunks=1, activation_checkpointing=mode)
    limited(0, torch.cuda.memory_allocated(0) + stages * QUANTISED // 2)

    assert_same(steps(pipeline, GPU, rows=1), steps(plain, "cpu", rows=1))


def of_two(layers: int, *, trained: bool) -> nn.Sequential:
    """Layers whose weights are made of two tensors that autograd saves as one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).double()
    for layer in model:
        one = layer.get_parameter("weight").detach()
        layer.weight = nn.Parameter(TwoTensor(one, one.clone()), requires_grad=trained)
    return model


@pytest.mark.parametrize("trained", [False, True])
@SIMULATED
def test_what_autograd_saves_of_a_weight_made_of_tensors(limited: Limit, trained: bool) -> None:
    stages = 32
    plain = of_two(stages, trained=trained)
    pipeline = on_host(*of_two(stages, trained=trained), chunks=1, activation_checkpointing="never")
    limited(0, torch.cuda.memory_allocated(0) + stages * 2 * 8 * WIDTH**2 // 4)
    x = torch.randn(2, WIDTH, dtype=torch.float64)

    for _ in range(2):
        for module, device in (plain, "cpu"), (pipeline, GPU):
            module(x.to(device)).square().sum().backward()

    for found, expected in zip(pipeline.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if found.grad is not None and expected.grad is not None:
            assert type(found.grad) is type(expected.grad)
            assert found.grad.device.type == "cpu"
            assert_same(
                getattr(found.grad, "a", found.grad), getattr(expected.grad, "a", expected.grad)
            )


@pytest.mark.parametrize("mode", ["always", "never"])
def test_layer_that_takes_the_scale_from_its_weight(mode: ActivationCheckpointing) -> None:
    """As bitsandbytes does in 8 bits: the layer would go on with what has left the device."""
    pipeline = on_host(*adapted(TakesScale, 3), activation_checkpointing=mode)

    with pytest.raises(RuntimeError, match=EDIT):
        pipeline(torch.randn(4, WIDTH, dtype=torch.float64, device=GPU))


def test_edit_of_a_scale_in_forward() -> None:
    class Edits(WithScale):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.scale.mul_(2)
            return super().forward(x)

    pipeline = on_host(*adapted(Edits, 3))

    with pytest.raises(RuntimeError, match=EDIT):
        pipeline(torch.randn(4, WIDTH, dtype=torch.float64, device=GPU))


def in_4_bits(linear: nn.Linear) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    made: Any = bitsandbytes.nn.Linear4bit(
        WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight = bitsandbytes.nn.Params4bit(
        linear.weight.detach().float(), requires_grad=False, quant_type="nf4", module=made
    )
    on_cpu: nn.Module = made.to("cpu")
    return on_cpu


def of_torchao(name: str) -> Kind:
    def make(linear: nn.Linear) -> nn.Module:
        library = pytest.importorskip("torchao.quantization")
        made = nn.Linear(WIDTH, WIDTH, bias=False)
        made.weight = nn.Parameter(linear.weight.detach().float())
        library.quantize_(made, getattr(library, name)())
        return made.requires_grad_(False)

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(in_4_bits, id="bitsandbytes-4-bits"),
        *(
            pytest.param(of_torchao(name), id=f"torchao-{name}")
            for name in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")
        ),
    ],
)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_weights_of_libraries(
    kind: Kind, mode: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "SIMULATED_GPUS" in os.environ:  # on which bitsandbytes has no kernels, but its default
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            pytest.importorskip("bitsandbytes")

    class Single(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = kind(layer)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x.float())
            return y.to(x.dtype)

    def run(weights: Weights) -> list[Any]:
        pipeline = GPipe(
            adapted(Single, 4),
            [1] * 4,
            devices=[GPU],
            chunks=2,
            weights=weights,
            activation_checkpointing=mode,
        )
        return steps(pipeline, GPU, rows=6)

    found, expected = run("host"), steps(adapted(Single, 4), "cpu", rows=6)

    assert_same(found, run("device"))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=0)  # layers in float32
