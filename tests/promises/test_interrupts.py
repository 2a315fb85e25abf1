"""No hang: Ctrl-C at any line of the calling thread leaves the layers as they were.

An interrupt can come at any line of the calling thread. Here it comes at every third line of the
modules that change something in the layers, when that runs for the first time or when it runs for
the last, and a step after a few of them must be equal to one without an interrupt before. A soak
has all lines, both times, and a step after each.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import lightning_gpipe
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.verify.step_verification import verify_step
from lightning_gpipe.core.verify.verification import verify
from tests.support.interrupts import first_and_last, interrupted_at
from tests.support.models import gradients
from tests.support.pipes import Pipe, with_and_without_threads

CORE = Path(lightning_gpipe.__file__).parent / "core"
ROOMS = ("faithful", "run")
ENGINE = {str(path) for room in ROOMS for path in (CORE / room).rglob("*.py")} | {
    str(CORE / "transport" / "inline.py")
}
VERIFICATION = {str(CORE / name) for name in ("faithful/journal.py", "verify/isolation.py")}

SOAK = settings.default is settings.get_profile("soak")
STRIKES = 1 if SOAK else 8  # before a step that looks for what they left
EVERY = 1 if SOAK else 3  # of the lines

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


class Counts(nn.Module):
    """Scales by a buffer that it edits, keeps one that it replaces, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.latest: Tensor = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.latest = x.detach().mean()
        return self.dropout(x * (2 if self.training else 1) / (1 + self.calls))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), Counts(), nn.Tanh(), nn.Linear(4, 2)
    ).double()


class Look:
    """What a run of the layers must not change: its objects, and what the modules have."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [(each, dict(each._parameters)) for each in module.modules()]
        self._keys = list(module.state_dict())
        self._flags = [each.training for each in module.modules()]
        self._attributes = [set(vars(each)) for each in module.modules()]

    def check(self, module: nn.Module) -> None:
        for each, parameters in self._parameters:
            assert all(each._parameters[name] is parameters[name] for name in parameters)
        assert list(module.state_dict()) == self._keys
        assert [each.training for each in module.modules()] == self._flags
        assert [set(vars(each)) for each in module.modules()] == self._attributes


def piped(pipe: Pipe, *, devices: int = 2) -> GPipe:
    return pipe(layers(), [3, 2], devices=devices, chunks=2, mode="always")


STATE = layers().state_dict()


def step(pipeline: GPipe) -> dict[str, Tensor]:
    """The gradients of a step and the buffers after it, from the same state whenever it is run."""
    pipeline.load_state_dict(STATE)
    pipeline.zero_grad()
    torch.manual_seed(3)
    backward(pipeline, pipeline(X))
    return copy.deepcopy({**gradients(pipeline), **dict(pipeline.named_buffers())})


def backward(pipeline: GPipe, y: Tensor) -> None:
    """Run backward in another training mode than the forward before was in."""
    pipeline.eval()
    y.square().sum().backward()
    pipeline.train()


def strike(pipeline: GPipe, files: set[str], run: Callable[[], Callable[[], object]]) -> int:
    """Interrupt ``run()`` at its lines, one after another; how often that was."""
    run()()  # some lines run only once
    expected, look = step(pipeline), Look(pipeline)
    struck = 0
    few = files is VERIFICATION  # lines
    moments = first_and_last(run(), files, both=SOAK or few)[:: 1 if few else EVERY]
    for k in range(0, len(moments), STRIKES):
        for line, time in moments[k : k + STRIKES]:
            struck += interrupted_at(run(), line, time)
            assert torch.is_grad_enabled()
            assert torch._C._len_torch_dispatch_stack() == 0, f"after {line}, time {time}"
            pipeline.train()
        found = step(pipeline)
        look.check(pipeline)
        where = f"after {moments[k : k + STRIKES]}"
        torch.testing.assert_close(found, expected, msg=partial("{}: {}".format, where))
    return struck


@with_and_without_threads
def test_interrupt_of_forward(pipe: Pipe) -> None:
    """Struck as a batch norm was patched, its statistics never moved again."""
    pipeline = piped(pipe)

    assert strike(pipeline, ENGINE, lambda: lambda: pipeline(X)) > 30


@with_and_without_threads
def test_interrupt_of_backward(pipe: Pipe) -> None:
    """Struck as buffers were lent, they were lost from the module and its state dict."""
    pipeline = piped(pipe)

    def run() -> Callable[[], object]:
        y = pipeline(X)
        return lambda: backward(pipeline, y)

    assert strike(pipeline, ENGINE, run) > 15


@with_and_without_threads
def test_interrupt_of_a_step(pipe: Pipe) -> None:
    """With a loss for each micro-batch, for which the hooks of parameters are removed."""
    pipeline = piped(pipe)
    pipeline.get_parameter("0.weight").register_hook(lambda gradient: 2 * gradient)

    def run() -> Callable[[], object]:
        return lambda: pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), X)

    assert strike(pipeline, ENGINE, run) > 30


def verification_of_a_step(pipeline: GPipe) -> object:
    return verify_step(pipeline, lambda x: pipeline(x).square().mean(), X)


@pytest.mark.parametrize("verification", [lambda model: verify(model, X), verification_of_a_step])
def test_interrupt_of_verification(verification: Callable[[GPipe], object], pipe: Pipe) -> None:
    """Struck as dropouts were switched off, they stayed so, or the next call was verified again."""
    pipeline = piped(pipe, devices=1)

    assert strike(pipeline, VERIFICATION, lambda: lambda: verification(pipeline)) > 10
    assert pipeline.chunks == 2
    assert pipeline.only.reads_losses
