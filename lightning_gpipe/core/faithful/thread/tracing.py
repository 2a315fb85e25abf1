"""Calls that are recorded, by torch.jit.trace, torch.export or torch.fx, or compiled.

A tracer must see the layers in order, on any number of rows, without micro-batches.

Threads, queues and autograd functions that run autograd cannot be part of a graph of torch.compile,
so Dynamo breaks its graph at the pipeline and continues behind it. Compiled layers stay compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PROXY, _FAKE = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def is_traced(input: Any, parameters: Iterable[Tensor]) -> bool:
    """Return whether a call with this input is recorded, or made with fake tensors.

    Layers whose ``parameters`` are fake too, as when their memory is counted, run as a pipeline.
    """
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(_PROXY) is not None
        or torch.compiler.is_exporting()
        or (torch._C._get_dispatch_mode(_FAKE) is not None and not _are_fake(parameters))
        or has_proxy(input)
    )


def not_compiled(function: _Function) -> _Function:
    """Wrap a function so that it breaks the graph of a compiled caller."""
    reason = (
        "a pipeline is not part of a graph: compile its layers one by one instead, "
        "and export with strict=False"
    )
    disabled: _Function = torch.compiler.disable(function, reason=reason)
    return disabled


def _are_fake(parameters: Iterable[Tensor]) -> bool:
    return all(isinstance(parameter, FakeTensor) for parameter in parameters)


def has_proxy(tree: Any) -> bool:
    """Return whether a value of a trace by torch.fx is in a tree; it is not asked for its class."""
    # To flatten the tree would be slow, and every step asks.
    kind = type(tree)
    if issubclass(kind, tuple | list | dict):
        return any(map(has_proxy, tree.values() if issubclass(kind, dict) else tree))
    return issubclass(kind, Proxy)
