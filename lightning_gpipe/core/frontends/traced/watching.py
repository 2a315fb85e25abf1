"""Watches a traced forward for calls of PyTorch's functions, and for random numbers.

torch.fx records the operations on its values. It does not see ``torch.zeros(3)``, an autograd
function or a random number, which would be constants of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.autograd import Function
from torch.fx.proxy import Proxy, TraceError
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from lightning_gpipe.core.faithful import RandomState
from lightning_gpipe.core.frontends.lines import is_users

_DRAWN = (
    "it draws random numbers, which would be the same in every step: draw them in a module of "
    "their own"
)


def _functions(names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(torch, name) for name in names.split()}


_FACTORIES = _functions(
    "arange zeros ones full empty eye linspace logspace tensor as_tensor tril_indices triu_indices"
)
_RANDOM = _functions("rand randn randint randperm normal")
AUTOWRAPPED = _FACTORIES | _RANDOM  # of torch, by name


class FunctionRecorder(TorchFunctionMode):
    """Records the calls of PyTorch's functions that a traced forward makes without any value."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        symbolic = next((kind for kind in types if issubclass(kind, Proxy)), None)
        if symbolic is not None:
            # Function modes of the caller are entered when the call runs, and not now as well.
            return symbolic.__torch_function__(func, types, args, kwargs)
        if func in _RANDOM.values():
            raise TraceError(_DRAWN)
        if func in _FACTORIES.values() and is_users(sys._getframe(1).f_code.co_filename):
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def any_arguments(tracer: fx.Tracer) -> Iterator[None]:
    """Record ``torch.zeros(rows, 3)`` of a number that is not known, which PyTorch refuses."""

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if _has_values((args, kwargs)):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return run

    # PyTorch lists the functions that make tensors when a default device is first in force, and
    # these would be on its list for good.
    with torch.device("cpu"):
        torch.empty(0)
    try:
        for name, function in AUTOWRAPPED.items():
            setattr(torch, name, recording(function))
        yield
    finally:
        for name, function in AUTOWRAPPED.items():
            setattr(torch, name, function)


@contextmanager
def functions_whole(tracer: fx.Tracer) -> Iterator[None]:
    """Record an autograd function as one call: within, it would run without gradients.

    The function of PyTorch's own activation checkpointing is traced through.
    """
    own = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            function, _, *rest = args
            return function(*rest)
        run = own.__get__(None, cls)
        if _has_values((args, kwargs)):
            return tracer.create_proxy("call_function", run, args, kwargs)
        return run(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for now
    try:
        yield
    finally:
        Function.apply = own  # type: ignore[method-assign]


def _has_values(tree: Any) -> bool:
    """Return whether a value of the trace is in a tree; a proxy is not asked for its class."""
    kind = type(tree)
    if issubclass(kind, tuple | list | dict):
        return any(map(_has_values, tree.values() if issubclass(kind, dict) else tree))
    return issubclass(kind, Proxy)


@contextmanager
def same_randomness() -> Iterator[None]:
    """Raise if random numbers are drawn, and undo that."""
    state = RandomState.capture()
    try:
        yield
        if {"cpu", "random"} & set(state.differences()):
            raise TraceError(_DRAWN)
    finally:
        state.restore()
