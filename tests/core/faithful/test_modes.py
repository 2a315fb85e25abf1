from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.faithful.modes import TorchModes


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
