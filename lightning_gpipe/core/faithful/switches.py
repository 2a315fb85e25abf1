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


class Switches(NamedTuple):
    """The positions of all switches on one thread, in their order."""

    flushes_denormals: bool
    hooks_refused: str | None
    multithreading: bool
    view_replay: bool
    torch_functions: tuple[bool, bool]

    @classmethod
    def read(cls) -> Switches:
        """Those of the calling thread."""
        return cls(
            _flushes_denormals(),
            _hooks_refused(),
            torch._C._is_multithreading_enabled(),
            torch._C._is_view_replay_enabled(),
            _torch_functions(),
        )

    def missing(self) -> list[Callable[[], Manager]]:
        """What the calling thread must enter to have them in these positions."""
        here = Switches.read()
        if here == self:
            return []
        positions = zip(_ENTERED, self, here, strict=True)
        return [partial(entered, mine) for entered, mine, other in positions if mine != other]


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


# How the calling thread gets the positions of Switches.
_ENTERED: tuple[Callable[[Any], Manager], ...] = (
    partial(_Set, _flushes_denormals, torch.set_flush_denormal),
    partial(_Set, _hooks_refused, _refuse_hooks),
    partial(_Set, torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    partial(_Set, torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    _with_torch_functions,
)
