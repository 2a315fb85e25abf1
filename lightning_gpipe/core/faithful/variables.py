"""Context variables for a recomputation.

A variable may have a list into which the caller collects what comes of the pipeline, as models of
transformers collect router logits. A mini-batch that kept the variables as they are would then keep
its own results, and their graph ends in the autograd node that keeps the mini-batch. Python's
garbage collector does not see that circle, because a part of it is in C++.
"""

from __future__ import annotations

import contextvars
from collections import deque
from typing import Any

from lightning_gpipe.core.data import Pending, receive_nothing


def for_recomputation(variables: contextvars.Context) -> contextvars.Context:
    """The variables with copies of lists, tuples, dicts, sets and deques, as they are now.

    What a recomputation adds to one is added to the copy, for the forward did that before. Tensors
    in them that have no value yet are left out. Objects of other kinds stay the same. Nobody
    receives loss terms.
    """
    found = variables.copy()
    found.run(_copy_containers)
    return found


def _copy_containers() -> None:
    receive_nothing()
    for variable, value in contextvars.copy_context().items():
        copy = _copied(value, {})
        if copy is not value:
            variable.set(copy)


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """A copy of a container of a built-in type, and of those in it; others are returned as is.

    Args:
        value: The object.
        made: Copies of containers that have been met, by the ids of those.
    """
    kind = type(value)
    if id(value) in made:
        return made[id(value)]
    if kind is tuple:
        return tuple(_copied(each, made) for each in value)
    if issubclass(kind, Pending):
        return None  # which will be a result
    if kind not in (list, dict, set, deque):
        return value
    made[id(value)] = copy = value.copy()
    if kind is dict:
        copy.update((key, _copied(each, made)) for key, each in value.items())
    elif kind is not set:  # whose elements are hashable, so no containers
        copy.clear()
        copy.extend(_copied(each, made) for each in value)
    return copy
