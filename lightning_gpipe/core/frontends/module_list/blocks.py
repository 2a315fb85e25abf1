"""A block whose calls are recorded.

nn.Module looks up ``_call_impl`` on the object before it runs any hook, so an instance attribute of
that name receives the calls, and a stage runs the block with its hooks on micro-batches. The
attribute ``forward`` would receive them between the caller's hooks, where there are no values yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful import Manager, not_compiled, setting
from lightning_gpipe.core.layout import structure_of

# Whether blocks run when they are called: in stages, where the caller's context variables hold.
RUNNING = ContextVar("RUNNING", default=False)

_FLAGS = frozenset({bool, str, type(None)})

# Called instead of a block, with its index, args and kwargs.
Receiver = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


def running() -> Manager:
    """Let blocks run when they are called, for the duration of a ``with`` block."""
    return setting(RUNNING.get, RUNNING.set, True)


class Block:
    """One block of the nn.ModuleList, which gets its module's calls while it is installed."""

    _receive: Receiver  # set when it is installed

    def __init__(
        self, module: nn.Module, k: int, name: str, stage: int, device: torch.device | None
    ) -> None:
        self.module, self.k, self.name, self.stage = module, k, name, stage
        self._structure = structure_of(module)
        self.parameters = _positional(module)
        self.device = device
        # torch.compile in place: `module.compile()` is called before `_call_impl` is looked up.
        self._compiled = module.__dict__.pop("_compiled_call_impl", None)
        own_call = MethodType(type(module)._call_impl, module)
        self.run: Callable[..., Any] = own_call if self._compiled is None else self._compiled

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key of blocks that return values of the same structure and shapes."""
        attributes = self.module.__dict__.copy().items()  # a worker may set one meanwhile
        flags = [(name, value) for name, value in attributes if type(value) in _FLAGS]
        return type(self.module), self._structure, *flags

    def install(self, receive: Receiver) -> None:
        self._receive = receive
        self.module.__dict__["_call_impl"] = self

    def remove(self) -> None:
        if is_installed(self.module):
            del self.module.__dict__["_call_impl"]
        if self._compiled is not None:
            self.module.__dict__["_compiled_call_impl"] = self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Most often the caller is a forward that is not compiled already.
        if torch.compiler.is_compiling():
            return not_compiled(self._call)(args, kwargs)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if RUNNING.get():
            return self.run(*args, **kwargs)
        return self._receive(self.k, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or deep copy of the module runs as the plain module. When this getattr runs, the
        # copy has no instance attributes yet, so it returns the method of the class.
        return getattr, (self.module, "_call_impl")


def is_installed(module: nn.Module) -> bool:
    """Return whether a module is a block whose calls are recorded."""
    return isinstance(module.__dict__.get("_call_impl"), Block)


def _positional(module: nn.Module) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
