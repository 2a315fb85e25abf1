"""Switches of PyTorch that each thread has for itself, and that are not modes.

They are seldom used, but a worker that has not the caller's computes something else: numbers that
the caller wants rounded to zero, tensor subclasses that it has switched off, hooks that it forbids.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.faithful.managers import Manager

_autograd = torch._C._autograd


class _Switch(NamedTuple):
    """One switch: its position on the calling thread, and how to change it."""

    read: Callable[[], Any]
    entered: Callable[[Any], Manager]


class Switches:
    """The positions of all switches on the thread that makes this."""

    def __init__(self) -> None:
        self._positions = [switch.read() for switch in _SWITCHES]

    def missing(self) -> list[Callable[[], Manager]]:
        """What the calling thread must enter to have them in these positions."""
        return [
            partial(switch.entered, position)
            for switch, position in zip(_SWITCHES, self._positions, strict=True)
            if switch.read() != position
        ]


class _Set:
    """Sets a switch for the duration of a ``with`` block."""

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], position: Any
    ) -> None:
        self._read, self._write, self._position = read, write, position

    def __enter__(self) -> None:
        self._before = self._read()
        self._write(self._position)

    def __exit__(self, *error: object) -> None:
        self._write(self._before)


def _settable(read: Callable[[], Any], write: Callable[[Any], object]) -> _Switch:
    return _Switch(read, partial(_Set, read, write))


_SMALLEST = sys.float_info.min  # of those that are not denormal


def _flushes_denormals() -> bool:
    """Whether ``torch.set_flush_denormal(True)`` is in force; PyTorch does not tell."""
    return _SMALLEST * 0.5 == 0.0  # Python's floats are rounded by the same unit


def _hooks_refused() -> str | None:
    """The message of ``torch.autograd.graph.disable_saved_tensors_hooks``.

    Hooks that were entered before stay in force, and workers must enter those.
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
    """Whether ``__torch_function__`` is called of subclasses, and of modes."""
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


_SWITCHES = (
    _settable(_flushes_denormals, torch.set_flush_denormal),
    _settable(_hooks_refused, _refuse_hooks),
    _settable(torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    _settable(torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    _Switch(_torch_functions, _with_torch_functions),
)
