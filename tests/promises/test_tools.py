"""Nothing silent: PyTorch's tools work in every stage as in the plain module.

Hooks on saved tensors pack, anomaly detection raises, modes change what is computed, FLOP counters
and profilers count.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.frontends.install import install
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.compilation import can_compile, compiled
from tests.support.models import Call, Poison, assert_same, gradients, perceptron, rows, step
from tests.support.pipes import RECOMPUTED, M, Pipe, every_mode, with_and_without_threads

# Saved tensors.


@with_and_without_threads
@every_mode
def test_offloading_to_the_cpu(
    pipe: Pipe, mode: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = perceptron(6)
    pipeline = pipe(plain, stages=3)
    counts, real = [0], Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        counts[-1] += 1
        return real(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    for module in (plain, pipeline):
        with save_on_cpu(pin_memory=False):
            loss = module(rows(7)).exp().sum()
            counts[-1] -= 1  # for the exponential's own
        counts.append(0)
        loss.backward()
        counts.append(0)

    in_plain_forward, in_plain_backward, in_forward, in_backward, _ = counts
    assert in_plain_forward > 0 == in_plain_backward
    assert in_forward == in_plain_forward * (M - RECOMPUTED[mode])
    assert in_backward == in_plain_forward * RECOMPUTED[mode]
    assert_same(gradients(pipeline), gradients(plain))


@every_mode
def test_offloading_to_a_disk(pipe: Pipe, tmp_path: Path) -> None:
    def pack(tensor: Tensor) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{id(tensor)}.pt"
        torch.save(tensor, path)
        return path

    def unpack(path: Path) -> Tensor:
        return torch.load(path)

    plain = perceptron(6)
    pipeline = pipe(plain, stages=3)
    with saved_tensors_hooks(pack, unpack):
        actual = step(pipeline, rows(7))

    assert list(tmp_path.iterdir())
    assert_same(actual._asdict(), step(plain, rows(7))._asdict())


def test_innermost_hooks_are_those_that_pack(pipe: Pipe) -> None:
    packed: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(name)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    pipeline = pipe(perceptron(6), stages=3, mode="never")
    with hooks("outer"), hooks("inner"):
        pipeline(rows(7))

    assert set(packed) == {"inner"}


# Anomalies.


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
@every_mode
@pytest.mark.parametrize("k", [0, 3, 5])
def test_anomaly_in_backward_reaches_the_caller(pipe: Pipe, k: int) -> None:
    plain = perceptron(6)
    plain[k] = Poison()

    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="Sqrt.*nan") as error:
        pipe(plain, stages=3)(rows(7)).sum().backward()

    assert f"on stage {k // 2} (" in error.value.__notes__[0]


# Modes.


class SineForTanh(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.sin if func is torch.tanh else func
        return func(*args, **(kwargs or {}))


class SineForTanhKernel(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.sin.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


@every_mode
@pytest.mark.parametrize("during", ["forward", "both"])
@pytest.mark.parametrize("enter", [SineForTanh, SineForTanhKernel])
def test_mode_that_changes_what_is_computed(
    pipe: Pipe, enter: Callable[[], Any], during: str
) -> None:
    """Once recomputation ran without it, as PyTorch leaves function modes to call backward."""
    plain = perceptron(6)
    pipeline, unchanged = pipe(plain, stages=3), plain(rows(7))
    ends = []

    for module in (plain, pipeline):
        x = rows(7)
        with enter():
            y = module(x)
        with enter() if during == "both" else nullcontext():
            y.exp().sum().backward()
        ends.append((y.detach(), x.grad, gradients(module)))

    assert not torch.equal(ends[0][0], unchanged)
    assert_same(ends[1], ends[0])


# FLOPs.


class Flops(NamedTuple):
    forward: int
    backward: int
    layers: list[int]  # in forward, those of each layer that takes any


def flops(module: nn.Module, x: Tensor) -> Flops:
    with FlopCounterMode(display=False) as forward:
        loss = module(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    own = [sum(c.values()) for name, c in forward.get_flop_counts().items() if "." in name]
    return Flops(forward.get_total_flops(), backward.get_total_flops(), own)


@pytest.mark.parametrize("chunks, mode", [(M, "never"), (M, 0), (1, "except_last"), (1, "never")])
def test_flops_without_recomputation(pipe: Pipe, chunks: int) -> None:
    plain = perceptron(6)
    pipeline = pipe(plain, stages=3, chunks=chunks)

    expected = flops(plain, rows(7))

    assert flops(pipeline, rows(7)) == expected
    assert expected.forward == sum(expected.layers) > 0


@pytest.mark.parametrize("mode, recomputed", [("always", 7), ("except_last", 5), (1, 3)])
def test_flops_with_recomputation(pipe: Pipe, recomputed: int) -> None:
    plain = perceptron(6)

    found, expected = flops(pipe(plain, stages=3), rows(7)), flops(plain, rows(7))

    assert found.forward == expected.forward
    assert found.backward == expected.backward + expected.forward * recomputed // 7


def test_flops_of_a_step(pipe: Pipe) -> None:
    plain = perceptron(6)
    counts = []

    for module in (plain, pipe(plain, stages=3, mode="never")):
        with FlopCounterMode(display=False) as counter:
            step(module, rows(7))
        counts.append(counter.get_total_flops())

    assert counts[1] == counts[0] > 0


def test_flops_of_the_first_forward_with_dropout(pipe: Pipe) -> None:
    """Once the first forward of a model that draws ran twice, so its FLOPs counted twice."""
    plain = nn.Sequential(*perceptron(3), nn.Dropout(0.5), *perceptron(2))

    assert flops(pipe(plain, stages=3, mode="never"), rows(7)) == flops(plain, rows(7))


class Pipelined(L.LightningModule):
    """A LightningModule whose layers may run as a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(7, 4)
        self.before = nn.Linear(4, 4)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.before(x))


@pytest.mark.skipif(not hasattr(ModelSummary, "total_flops"), reason="older Lightning")
@pytest.mark.parametrize("depth", [1, 2])
def test_flops_in_lightnings_summary(pipe: Pipe, depth: int) -> None:
    model = Pipelined()
    expected = ModelSummary(model, max_depth=depth)
    installed = install(
        model.layers, pipe(model.layers, stages=3, mode="always", copy=False).forward
    )

    found = ModelSummary(model, max_depth=depth)
    installed.remove()

    assert found.total_flops == expected.total_flops == 2 * 7 * (16 + 32 + 64 + 16)
    assert found.flop_counts == expected.flop_counts
    assert found.param_nums == expected.param_nums
    assert found.total_parameters == expected.total_parameters


# What PyTorch tells to do for threads.


def test_profiler_that_records_all_threads(pipe: Pipe) -> None:
    pipeline = pipe(nn.Sequential(*perceptron(5), Call(lambda x: x.sin())), mode="never")
    step(pipeline, rows(7))
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as profile:
        step(pipeline, rows(7))

    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::addmm"] == counts["AddmmBackward0"] == M * 3


# Compilation.


@pytest.mark.skipif(not can_compile(), reason="needs torch.compile, and modes that it may ignore")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks at it
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("rate", [0.0, 0.5], ids=["without dropout", "with dropout"])
def test_compiled_layer_stays_compiled_and_draws_the_same_again(pipe: Pipe, rate: float) -> None:
    """Whether layers draw is found out in a dispatch mode, and in one nothing is compiled."""
    graphs: list[int] = []
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate), nn.Tanh()).double()
    module = nn.Sequential(compiled(inner, graphs), nn.Linear(4, 4).double(), nn.Tanh())
    found = []
    for mode in ("always", "never"):
        pipeline = pipe(module, [1, 2], mode=mode, chunks=3, copy=False)
        torch.manual_seed(1)
        for _ in range(2):
            pipeline.zero_grad()
            step(pipeline, rows(6, 4))
        found.append(gradients(pipeline))

    assert graphs
    torch.testing.assert_close(found[0], found[1])


class Branches(nn.Module):
    """Chooses by a higher-order operator, which runs one of two functions."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.dropout, torch.neg, (x,))


@pytest.mark.skipif(not can_compile(), reason="torch.cond needs torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@with_and_without_threads
@pytest.mark.parametrize("rate", [0.0, 0.5], ids=["without dropout", "with dropout"])
def test_higher_order_operators(pipe: Pipe, rate: float) -> None:
    """Once they failed in the dispatch mode in which draws are noticed."""
    pipeline = pipe(nn.Sequential(Branches(rate), nn.Tanh()), [1, 1], chunks=2)
    outputs = []
    for _ in range(2):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(pipeline(rows(6).detach().abs()))

    torch.testing.assert_close(*outputs)
