"""The caller's thread-local state, captured once and entered in workers.

A new thread has neither autocast, grad mode, inference mode, hooks on saved tensors nor the default
device of its parent. So a worker enters what differs around each row of actions. A recomputation
enters the state of the forward that it repeats, the process-wide default type included.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.faithful.managers import (
    NOTHING,
    Bracket,
    LazyManagers,
    Manager,
    setting,
)
from lightning_gpipe.core.faithful.thread.modes import TorchModes
from lightning_gpipe.core.faithful.thread.recomputing import for_recomputation

# Lightning replaces `torch.no_grad` and `torch.inference_mode` while a step runs (on its main
# branch); these are PyTorch's own.
_set_grad_enabled = torch.autograd.grad_mode.set_grad_enabled
_inference_mode = torch.autograd.grad_mode.inference_mode

_NAMES = (
    ("grad", "grad mode"),
    ("inference", "inference mode"),
    ("autocast", "autocast"),
    ("default_device", "default device"),
    ("saved_tensors_hooks", "hooks on saved tensors"),
)

_autograd = torch._C._autograd
_CPU = torch.device("cpu")
_TYPE = attrgetter("type")
_NO_VARIABLES = contextvars.Context()

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Hooks cannot be removed, only overridden by hooks that do what autograd does without any.
NO_HOOKS: Hooks = (torch.Tensor.detach, _as_is)


class Autocast(NamedTuple):
    """The state of autocast for one device type."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def of(cls, device_type: str) -> Autocast:
        dtype = torch.get_autocast_dtype(device_type)
        enabled, cached = torch.is_autocast_enabled(device_type), torch.is_autocast_cache_enabled()
        return cls(device_type, dtype, enabled, cached)

    @property
    def is_here(self) -> bool:
        """True if the calling thread has this state."""
        kind, dtype, enabled, cached = self  # on the hot path
        return (
            torch.is_autocast_enabled(kind) == enabled
            and torch.get_autocast_dtype(kind) == dtype
            and torch.is_autocast_cache_enabled() == cached
        )

    def entered(self) -> torch.autocast:
        return torch.autocast(*self)


class Context(NamedTuple):
    """The thread-local state of a caller."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]  # one for each device type
    modes: TorchModes  # another thread cannot enter them
    default_device: torch.device  # of tensors from factory functions such as torch.zeros
    default_dtype: torch.dtype  # of all threads
    saved_tensors_hooks: Hooks | None  # the innermost
    switches: list[Any]  # the positions of switches that are not modes
    variables: contextvars.Context

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> Context:
        device_types = sorted({"cpu", *map(_TYPE, devices)})
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(map(Autocast.of, device_types)),
            TorchModes.capture(),
            _default_device(),
            torch.get_default_dtype(),
            saved_tensors_hooks(),
            _positions(),
            contextvars.copy_context(),
        )

    def missing(self) -> list[Callable[[], Manager]]:
        """Return functions that make the context managers to give the calling thread this state."""
        # Functions, since some managers act when they are made.
        missing: list[Callable[[], Manager]] = []
        if torch.is_inference_mode_enabled() != self.inference:
            missing.append(partial(_inference_mode, self.inference))
        for autocast in self.autocast:
            if not autocast.is_here:
                missing.append(autocast.entered)
        if _default_device() != self.default_device:
            missing.append(lambda: self.default_device)
        if (positions := _positions()) != self.switches:
            missing += _switched(self.switches, positions)
        if torch.is_grad_enabled() != self.grad or missing:  # inference mode changes it too
            missing.append(partial(_set_grad_enabled, self.grad))
        return missing

    def entered(self) -> Manager:
        """Give the calling thread this state in a ``with`` block that it enters at once."""
        missing = self.missing()
        return LazyManagers(lambda: (make() for make in missing)) if missing else NOTHING

    def differences(self) -> list[str]:
        here = Context.capture(torch.device(autocast.device_type) for autocast in self.autocast)
        return [name for field, name in _NAMES if getattr(self, field) != getattr(here, field)]

    def without_autocast(self) -> Context:
        if not any(autocast.enabled for autocast in self.autocast):
            return self
        off = tuple(autocast._replace(enabled=False) for autocast in self.autocast)
        return self._replace(autocast=off)

    def for_backward(self, *, recomputes: bool) -> Context:
        """Return this state without context variables, or for a recomputation their copies."""
        variables = for_recomputation(self.variables) if recomputes else _NO_VARIABLES
        return self._replace(variables=variables)

    def default_dtype_set(self) -> Manager:
        """Set the default type, of all threads, for the duration of a ``with`` block."""
        if torch.get_default_dtype() == self.default_dtype:  # most often
            return NOTHING
        return setting(torch.get_default_dtype, torch.set_default_dtype, self.default_dtype)

    def clear_autocast_cache(self) -> None:
        """Empty autocast's cache of weights in low precision, whose keys are shadows of one run."""
        # PyTorch empties it only at the end of the caller's `with torch.autocast`.
        for autocast in self.autocast:
            if autocast.enabled and autocast.cache_enabled:
                torch.clear_autocast_cache()
                return

    @property
    def saves_as_here(self) -> bool:
        return _top_hooks() == self.saved_tensors_hooks

    def saving(self) -> Manager:
        return _hooked(self.saved_tensors_hooks)

    @staticmethod
    def dropping() -> Manager:
        """Apply no hooks in a ``with`` block whose saved tensors will be dropped."""
        return _hooked(None)


def _default_device() -> torch.device:
    no_mode = torch._C._len_torch_function_stack() == 0
    if no_mode and not hasattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context"):
        return _CPU  # what get_default_device() returns then, after five calls
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.8, after torch.set_default_device(None)
        return _CPU


def saved_tensors_hooks() -> Hooks | None:
    """Return the innermost hooks on saved tensors, but for those of ``torch.utils.checkpoint``."""
    hooks = _top_hooks()
    # Those of a checkpoint would run the pipeline again, within its own backward.
    if hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint":
        return None
    return hooks


def without_checkpointing() -> Manager:
    """Apply the hooks on saved tensors in a ``with`` block, but for those of a checkpoint."""
    return _hooked(saved_tensors_hooks())


def _top_hooks() -> Hooks | None:
    hooks: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _hooked(hooks: Hooks | None) -> Manager:
    if _autograd._top_saved_tensors_default_hooks(True) == hooks:  # on the hot path
        return NOTHING
    return torch.autograd.graph.saved_tensors_hooks(*(hooks or NO_HOOKS))


def on_engine_thread() -> bool:
    """Return whether autograd started the thread: Note [The blocking node must be a CPU node]."""
    # Python has only a dummy object for a thread that it did not start.
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return foreign and torch._C._current_graph_task_id() != -1


# Switches that are not modes. They are seldom used, but a worker without the caller's settings
# computes something else: it keeps denormals that the caller flushes to zero, or calls tensor
# subclasses and hooks that it disabled.

_SMALLEST = sys.float_info.min  # of those that are not denormal


def _positions() -> list[Any]:
    """Return the positions of the calling thread's switches; in one call, since many ask."""
    hooked = _autograd._top_saved_tensors_default_hooks(True) is not None
    return [
        # PyTorch cannot tell whether torch.set_flush_denormal(True) was called. Python's floats are
        # rounded by the same unit.
        _SMALLEST * 0.5 == 0.0,
        # The message of torch.autograd.graph.disable_saved_tensors_hooks. Hooks that were entered
        # before it stay in force, and workers must enter those.
        None if hooked else _autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._is_multithreading_enabled(),
        torch._C._is_view_replay_enabled(),
        # Whether __torch_function__ is called of subclasses, and of modes.
        (torch._C._is_torch_function_enabled(), not torch._C._is_torch_function_all_disabled()),
    ]


def _refuse_hooks(message: str | None) -> None:
    if message is None:
        _autograd._saved_tensors_hooks_enable()
    else:
        _autograd._saved_tensors_hooks_disable(message)


def _with_torch_functions(wanted: tuple[bool, bool], _: tuple[bool, bool]) -> Manager:
    subclasses, modes = wanted
    if subclasses:
        guard: Manager = torch._C._EnableTorchFunction()
    elif modes:
        guard = torch._C.DisableTorchFunctionSubclass()
    else:
        guard = torch._C.DisableTorchFunction()
    return guard


def _written(write: Callable[[Any], object], wanted: Any, here: Any) -> Manager:
    return Bracket(partial(write, wanted), lambda _: write(here))


# How to set each switch from its position here, in the order of `_positions`.
_SWITCHES: tuple[Callable[[Any, Any], Manager], ...] = (
    partial(_written, torch.set_flush_denormal),
    partial(_written, _refuse_hooks),
    partial(_written, torch._C._set_multithreading_enabled),
    partial(_written, torch._C._set_view_replay_enabled),
    _with_torch_functions,
)


def _switched(wanted: Sequence[Any], here: Sequence[Any]) -> list[Callable[[], Manager]]:
    switches = zip(_SWITCHES, wanted, here, strict=True)
    return [partial(entered, mine, other) for entered, mine, other in switches if mine != other]
