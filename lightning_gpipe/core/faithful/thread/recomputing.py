"""Context variables of a forward that runs again.

A variable may hold a list in which the caller collects results, such as router logits. A mini-batch
that kept this list would keep its own results, and their graph ends in the autograd node that keeps
the mini-batch: a cycle that Python's garbage collector does not see, as a part of it is in C++.
"""

from __future__ import annotations

import contextvars
from collections import deque
from contextvars import ContextVar
from typing import Any

from lightning_gpipe.core.data import PendingTensor, term_receiver

# Set in the copy of the caller's context variables in which a recomputation runs.
RECOMPUTING = ContextVar("RECOMPUTING", default=False)


def is_recomputing() -> bool:
    """Return whether the calling layer's forward runs again, to recompute dropped activations.

    Use it in a layer that must do something once for each micro-batch. The result is False in the
    first forward, in the plain module, and outside of layers.

    Example::

        def forward(self, x):
            if not is_recomputing():
                log_statistics(x)
            return self.linear(x)
    """
    return RECOMPUTING.get()


def for_recomputation(variables: contextvars.Context) -> contextvars.Context:
    """Copy the variables, and the containers in them, to which forward has added its results.

    Tensors without a value yet are left out, and loss terms are not received.
    """
    copy = variables.copy()
    copy.run(_copy_containers)
    return copy


def _copy_containers() -> None:
    term_receiver.set(None)
    for variable, value in contextvars.copy_context().items():
        copy = _copied(value, {})
        if copy is not value:
            variable.set(copy)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a container of a built-in type and those in it; ``copies`` has earlier ones by id."""
    kind = type(value)
    if id(value) in copies:
        return copies[id(value)]
    if kind is tuple:
        return tuple(_copied(each, copies) for each in value)
    if issubclass(kind, PendingTensor):
        return None  # which will be a result
    if kind not in (list, dict, set, deque):
        return value
    copies[id(value)] = copy = value.copy()
    if kind is dict:
        copy.update((key, _copied(each, copies)) for key, each in value.items())
    elif kind is not set:  # whose elements are hashable, so no containers
        copy.clear()
        copy.extend(_copied(each, copies) for each in value)
    return copy
