"""Nothing silent: a layer has the caller's state in forward, recomputation and backward.

A layer records the state that it sees in the plain module, and must see the same in a pipeline: in
forward *and* recomputation the state of forward, in backward that of backward, wherever the state
was entered.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, Runs, assert_same, gradients, perceptron, rows
from tests.support.pipes import RECOMPUTED, M, Pipe, every_mode


class Spy(nn.Module):
    """The identity, which writes down what ``look`` finds in forward and in backward."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look = look
        self.runs = Runs()

    def forward(self, x: Tensor) -> Tensor:
        self.runs.forward.append(self.look())
        return _Spied.apply(x, self)


class _Spied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spy: Spy) -> Tensor:
        ctx.spy = spy
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.spy.runs.backward.append(ctx.spy.look())
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


@contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def look_at_a_denormal() -> Any:
    return (torch.tensor(1e-310, dtype=torch.float64) * 0.5).item()


class Subclass(Tensor):
    """A tensor of which each function is -1."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return -1


def look_at_a_subclass() -> Any:
    return float(torch.add(torch.ones(()).as_subclass(Subclass), 1))


def look_at_hooks() -> Any:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return "allowed"
    except RuntimeError as error:
        return str(error)


def look_at_view_replay() -> Any:
    return torch._C._is_view_replay_enabled()


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
    "flushed denormals": State(flushed, look_at_a_denormal),
    "no subclasses": State(torch._C.DisableTorchFunctionSubclass, look_at_a_subclass),
    "no torch function": State(torch._C.DisableTorchFunction, look_at_a_subclass),
    "no hooks": State(
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"), look_at_hooks
    ),
    "one thread for autograd": State(
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "replayed views": State(
        lambda: torch.autograd.grad_mode._force_original_view_tracking(True), look_at_view_replay
    ),
}
# They belong to the process, so what is computed in backward has those of backward.
OF_THE_PROCESS: dict[str, State] = {
    "default dtype": State(default_dtype, look_at_default_dtype),
    "determinism": State(deterministic, look_at_determinism),
    "anomaly": State(lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}


def assert_seen_alike(pipeline: GPipe, plain: nn.Module, mode: ActivationCheckpointing) -> None:
    for one, other in zip(spies(pipeline), spies(plain), strict=True):
        assert one.runs.forward == other.runs.forward * (M + RECOMPUTED[mode])
        assert one.runs.backward == other.runs.backward * M


@every_mode
@pytest.mark.parametrize("during", ["forward", "backward", "both"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_layers_see_the_callers_state(
    pipe: Pipe, state: State, during: str, mode: ActivationCheckpointing
) -> None:
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
def test_layers_see_the_state_of_the_process(
    pipe: Pipe, state: State, mode: ActivationCheckpointing
) -> None:
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

    assert spies(plain)[0].runs.forward == [(False, enter is torch.inference_mode)]
    for one, other in zip(spies(pipeline), spies(plain), strict=True):
        assert one.runs.forward == other.runs.forward * M


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


def test_output_of_another_dtype_than_that_of_autocast(pipe: Pipe) -> None:
    """Once autocast refused to concatenate it."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    pipeline = pipe(nn.Sequential(*layers, Call(Tensor.half)), [2, 1])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipeline(rows(7)).dtype == torch.float16
