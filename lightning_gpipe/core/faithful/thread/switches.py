"""Thread-local switches of PyTorch that are not modes.

They are seldom used, but a worker without the caller's settings computes something else: it keeps
denormals that the caller flushes to zero, or calls tensor subclasses and hooks that it disabled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_gpipe.core.faithful.managers import Manager, Setting

_autograd = torch._C._autograd


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


def _setting(
    read: Callable[[], Any], write: Callable[[Any], object]
) -> tuple[Callable[[], Any], Callable[[Any], Manager]]:
    return read, partial(Setting, read, write)


# How the calling thread's switches are read, and the context managers that set them.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Manager]], ...] = (
    _setting(_flushes_denormals, torch.set_flush_denormal),
    _setting(_hooks_refused, _refuse_hooks),
    _setting(torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    _setting(torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    (_torch_functions, _with_torch_functions),
)


def positions() -> list[Any]:
    """Return the positions of all switches on the calling thread."""
    return [read() for read, _ in _SWITCHES]


def switched(wanted: Sequence[Any]) -> list[Callable[[], Manager]]:
    """Return functions that make the context managers to give the switches these positions."""
    here = positions()
    if here == wanted:
        return []
    switches = zip(_SWITCHES, wanted, here, strict=True)
    return [partial(entered, mine) for (_, entered), mine, other in switches if mine != other]
