"""Promise: a layer sees the caller's state in forward, recomputation and backward.

What the plain module's layers see is written down by a layer in their midst, and what those of a
pipeline see must be the same: in forward *and* recomputation what forward sees, in backward what
backward sees, wherever the state was entered. What a state is there for must happen, too: tensors
packed, FLOPs counted, errors raised.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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

from lightning_gpipe.core.frontends.install import install, remove
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan.recompute import Mode
from tests.support.models import Call, Poison, assert_same, gradients, perceptron, rows, step
from tests.support.pipes import RECOMPUTED, M, Pipe, every_mode


class Spy(nn.Module):
    """The identity, which writes down what ``look`` finds in forward and in backward."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look = look
        self.forwards: list[Any] = []
        self.backwards: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(self.look())
        return _Spied.apply(x, self)


class _Spied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spy: Spy) -> Tensor:
        ctx.spy = spy
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.spy.backwards.append(ctx.spy.look())
        return gradients[0], None


def spied(look: Callable[[], Any], stages: int = 3) -> nn.Sequential:
    """Layers of which every second is a spy."""
    return nn.Sequential(*(each for _ in range(stages) for each in (nn.Linear(3, 3), Spy(look))))


def spies(module: nn.Module) -> list[Spy]:
    return [layer for layer in module.modules() if isinstance(layer, Spy)]


# What a layer sees.

MODE: ContextVar[str] = ContextVar("MODE", default="of nobody")


@contextmanager
def variable() -> Iterator[None]:
    token = MODE.set("of the caller")
    yield
    MODE.reset(token)


@contextmanager
def default_dtype() -> Iterator[None]:
    """As Lightning's precision "64-true" and "bf16-true" have it, in forward only."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def lowered() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


def look_at_autocast() -> Any:
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    cache = torch.is_autocast_cache_enabled()
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), cache, product.dtype


def look_at_default_device() -> Any:
    return torch.empty(0).device, torch.zeros(()).device


def look_at_default_dtype() -> Any:
    return torch.get_default_dtype(), torch.zeros(()).dtype


def look_at_determinism() -> Any:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


class State(NamedTuple):
    enter: Callable[[], AbstractContextManager[Any]]
    look: Callable[[], Any]


STATES: dict[str, State] = {
    "bfloat16": State(lambda: torch.autocast("cpu", dtype=torch.bfloat16), look_at_autocast),
    "float16": State(lambda: torch.autocast("cpu", dtype=torch.float16), look_at_autocast),
    "no cache": State(lambda: torch.autocast("cpu", cache_enabled=False), look_at_autocast),
    "lowered": State(lowered, look_at_autocast),
    "default device": State(lambda: torch.device("meta"), look_at_default_device),
    "gradients": State(torch.enable_grad, torch.is_grad_enabled),
    "context variable": State(variable, MODE.get),
}
# They belong to the process, so what is computed in backward has those of backward.
OF_THE_PROCESS: dict[str, State] = {
    "default dtype": State(default_dtype, look_at_default_dtype),
    "determinism": State(deterministic, look_at_determinism),
    "anomaly": State(lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}


def assert_seen_alike(pipeline: GPipe, plain: nn.Module, mode: Mode) -> None:
    for one, other in zip(spies(pipeline), spies(plain), strict=True):
        assert one.forwards == other.forwards * (M + RECOMPUTED[mode])
        assert one.backwards == other.backwards * M


@every_mode
@pytest.mark.parametrize("during", ["forward", "backward", "both"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_layers_see_the_callers_state(pipe: Pipe, state: State, during: str, mode: Mode) -> None:
    """Once recomputation saw the context variables of backward, so a layer could act otherwise."""
    plain = spied(state.look)
    pipeline = pipe(plain, stages=3)

    for module in (plain, pipeline):
        x = torch.ones(7, 3, requires_grad=True)
        with state.enter() if during != "backward" else nullcontext():
            y = module(x)
        loss = y.float().sum()
        with state.enter() if during != "forward" else nullcontext():
            loss.backward()

    assert_seen_alike(pipeline, plain, mode)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@every_mode
@pytest.mark.parametrize("state", OF_THE_PROCESS.values(), ids=OF_THE_PROCESS)
def test_layers_see_the_state_of_the_process(pipe: Pipe, state: State, mode: Mode) -> None:
    plain = spied(state.look)
    pipeline = pipe(plain, stages=3)

    for module in (plain, pipeline):
        x = torch.ones(7, 3, requires_grad=True)
        with state.enter():
            module(x).sum().backward()

    assert_seen_alike(pipeline, plain, mode)


@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_layers_see_that_nothing_is_recorded(pipe: Pipe, enter: Callable[[], Any]) -> None:
    plain = spied(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    pipeline = pipe(plain, stages=3)

    for module in (plain, pipeline):
        with enter():
            module(torch.ones(7, 3))

    assert spies(plain)[0].forwards == [(False, enter is torch.inference_mode)]
    for one, other in zip(spies(pipeline), spies(plain), strict=True):
        assert one.forwards == other.forwards * M


def test_caller_keeps_its_state(pipe: Pipe) -> None:
    def look() -> Any:
        return look_at_autocast(), torch.is_grad_enabled(), torch.empty(0).device, MODE.get()

    pipeline, x = pipe(perceptron(6), stages=3), rows(7)
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), variable():
        before = look()
        pipeline(x)
        assert look() == before


# Defaults that decide what a layer makes.


class Shifted(nn.Module):
    """Adds a tensor of the default dtype and device."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.linspace(0.1, 1, 3)).sin()


@every_mode
def test_default_dtype_in_forward_only(pipe: Pipe) -> None:
    """Once recomputation made its tensors in backward's default dtype: less exact gradients."""
    plain = nn.Sequential(*perceptron(2), Shifted(), *perceptron(2), Shifted())
    pipeline = pipe(plain, stages=3)

    for module in (plain, pipeline):
        with default_dtype():
            loss = module(rows(7)).exp().sum()
        loss.backward()

    assert_same(gradients(pipeline), gradients(plain))


# Saved tensors.


@every_mode
def test_offloading_to_the_cpu(pipe: Pipe, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
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

    pipeline = pipe(perceptron(6), stages=3)
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
    install(model.layers, pipe(model.layers, stages=3, mode="always", copy=False).forward)

    found = ModelSummary(model, max_depth=depth)
    remove(model.layers)

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
