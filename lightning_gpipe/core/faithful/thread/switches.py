"""Thread-local switches of PyTorch that are not modes.

They are seldom used, but a worker without the caller's settings computes something else: it keeps
denormals that the caller flushes to zero, or calls tensor subclasses and hooks that it disabled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.faithful.managers import Manager, Setting

_autograd = torch._C._autograd


class Switches(NamedTuple):
    """The positions of all switches on one thread."""

    flushes_denormals: bool
    hooks_refused: str | None
    multithreading: bool
    view_replay: bool
    torch_functions: tuple[bool, bool]

    @classmethod
    def read(cls) -> Switches:
        """Read the switches of the calling thread."""
        return cls(
            _flushes_denormals(),
            _hooks_refused(),
            torch._C._is_multithreading_enabled(),
            torch._C._is_view_replay_enabled(),
            _torch_functions(),
        )

    def missing(self) -> list[Callable[[], Manager]]:
        """Return functions that make the context managers to set the thread's switches."""
        here = Switches.read()
        if here == self:
            return []
        positions = zip(_ENTERED, self, here, strict=True)
        return [partial(entered, mine) for entered, mine, other in positions if mine != other]


_SMALLEST = sys.float_info.min  # of those that are not denormal


def _flushes_denormals() -> bool:
    # PyTorch cannot tell whether torch.set_flush_denormal(True) was called. Python's floats are
    # rounded by the same unit.
    return _SMALLEST * 0.5 == 0.0


def _hooks_refused() -> str | None:
    """Return the message of ``torch.autograd.graph.disable_saved_tensors_hooks``.

    Hooks that were entered before it stay in force, and workers must enter those.
    """
    if _autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    message: str | None = _autograd._saved_tensors_hooks_get_disabled_error_message()
    return message


def _refuse_hooks(message: str | None) -> None:
    if message is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message)


def _torch_functions() -> tuple[bool, bool]:
    """Return whether ``__torch_function__`` is called of subclasses, and of modes."""
    return torch._C._is_torch_function_enabled(), not torch._C._is_torch_function_all_disabled()


def _with_torch_functions(position: tuple[bool, bool]) -> Manager:
    subclasses, modes = position
    if subclasses:
        guard: Manager = torch._C._EnableTorchFunction()
    elif modes:
        guard = torch._C.DisableTorchFunctionSubclass()
    else:
        guard = torch._C.DisableTorchFunction()
    return guard


# Context managers that set the calling thread's switches, in the order of the fields of Switches.
_ENTERED: tuple[Callable[[Any], Manager], ...] = (
    partial(Setting, _flushes_denormals, torch.set_flush_denormal),
    partial(Setting, _hooks_refused, _refuse_hooks),
    partial(Setting, torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    partial(Setting, torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    _with_torch_functions,
)
