"""What is looked at while a forward is traced: calls of PyTorch's functions, and random numbers.

torch.fx sees what is done with its values. It does not see ``torch.zeros(3)``, an autograd function
or a random number, which would be constants of the graph.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.autograd import Function
from torch.fx.proxy import Proxy, TraceError
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from lightning_gpipe.core.frontends.lines import is_users

_FACTORIES = (
    "arange zeros ones full empty eye linspace logspace tensor as_tensor tril_indices triu_indices"
)
_RANDOM = "rand randn randint randperm normal"
_DRAWN = (
    "it draws random numbers, which would be the same in every step: draw them in a module of "
    "their own"
)


def _functions(names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(torch, name) for name in names.split()}


AUTOWRAPPED = _functions(f"{_FACTORIES} {_RANDOM}")  # of torch, by name


class Recording(TorchFunctionMode):
    """Looks at the calls of PyTorch's functions that a traced forward makes without any value."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._factories = set(_functions(_FACTORIES).values())
        self._random = set(_functions(_RANDOM).values())

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        symbolic = next((each for each in types if issubclass(each, Proxy)), None)
        if symbolic is not None:
            # Function modes of the caller are entered when the call runs, and not now as well.
            return symbolic.__torch_function__(func, types, args, kwargs)
        if func in self._random:
            raise TraceError(_DRAWN)
        if func in self._factories and is_users(sys._getframe(1).f_code.co_filename):
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def any_arguments(tracer: fx.Tracer) -> Iterator[None]:
    """Record ``torch.zeros(rows, 3)`` of a number that is not known, which PyTorch refuses."""

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(issubclass(type(each), Proxy) for each in _flat((args, kwargs))):
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

    PyTorch's own for activation checkpointing is traced through.
    """
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            function, _, *rest = args
            return function(*rest)
        run = original.__get__(None, cls)
        if any(issubclass(type(each), Proxy) for each in _flat((args, kwargs))):
            return tracer.create_proxy("call_function", run, args, kwargs)
        return run(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for now
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list | dict):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _flat(each)
    else:
        yield tree


@contextmanager
def same_randomness() -> Iterator[None]:
    """Raise if random numbers are drawn, and undo that."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
        if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
            raise TraceError(_DRAWN)
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
