from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.random.private_generators import PrivateGenerators
from lightning_gpipe.core.faithful.thread.modes import ThreadState, TorchModes


class SineForCosine(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func is torch.cos else func)(*args, **(kwargs or {}))


class ExpForLog(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.ops.aten.exp.default if func is torch.ops.aten.log.default else func
        return func(*args, **(kwargs or {}))


X = torch.tensor([1.0, 2.0])


def test_no_mode_by_default() -> None:
    assert not TorchModes.capture()


def test_default_device_is_none_of_them() -> None:
    with torch.device("meta"):
        assert not TorchModes.capture()


def test_modes_of_both_kinds() -> None:
    with SineForCosine() as function, torch.device("meta"), ExpForLog() as dispatch:
        assert TorchModes.capture() == TorchModes((function,), (dispatch,))


def test_modes_that_are_gone_are_entered_again() -> None:
    with SineForCosine(), ExpForLog():
        modes = TorchModes.capture()

    with modes.entered():
        assert torch.equal(torch.cos(X), torch.sin(X))
        assert torch.equal(torch.log(X), torch.exp(X))

    assert not torch.equal(torch.cos(X), torch.sin(X))
    assert not TorchModes.capture()


def test_modes_that_are_there_are_left_alone() -> None:
    with SineForCosine(), ExpForLog():
        modes = TorchModes.capture()
        with modes.entered():
            assert TorchModes.capture() == modes


def test_counter_that_was_read_does_not_go_on() -> None:
    with FlopCounterMode(display=False) as counter:
        modes = TorchModes.capture()

    with modes.entered():
        X @ X

    assert modes
    assert counter.get_total_flops() == 0


def redirecting() -> Manager:
    """A mode of the engine's own."""
    return PrivateGenerators(b"seed", 0, [torch.device("cpu")]).drawing(0)


def test_own_mode_that_an_interrupt_left_is_exited() -> None:
    """To take it from the stack is not all that its exit does."""
    before, within = ThreadState.capture(), is_in_torch_dispatch_mode()
    redirecting().__enter__()

    before.restore()

    assert ThreadState.capture() == before
    assert is_in_torch_dispatch_mode() == within


def test_modes_that_an_interrupt_left_are_taken_away() -> None:
    """Ctrl-C just before a ``with`` block exits leaves the mode to nobody.

    Modes of the user were popped without PyTorch's own exit, so that it went on to believe that one
    was active: from then on, everything compiled was compiled again at each call.
    """
    before, within = ThreadState.capture(), is_in_torch_dispatch_mode(include_infra_modes=False)
    with ExitStack() as stack:
        stack.callback(before.restore)
        for mode in (ExpForLog(), redirecting(), ExpForLog(), SineForCosine()):
            mode.__enter__()
        torch._C._set_grad_enabled(False)

        before.restore()

        assert ThreadState.capture() == before
        assert not TorchModes.capture()
        assert is_in_torch_dispatch_mode(include_infra_modes=False) == within
        assert torch.is_grad_enabled()


def test_mode_that_was_pushed_again_is_popped() -> None:
    """It was not entered, so it has nothing to restore."""
    before, mode = ThreadState.capture(), ExpForLog()
    with mode:
        modes = TorchModes.capture()
    modes.entered().__enter__()

    before.restore()

    assert ThreadState.capture() == before
