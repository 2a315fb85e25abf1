"""The arguments of a call as a user types them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def typed(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """The arguments that differ from their defaults, such as ``balance=[2, 4], chunks=8``.

    Args:
        function: What was called.
        given: The values of its parameters; other entries are not looked at.
    """
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        f"{each.name}={given[each.name]!r}"
        for each in parameters
        if given[each.name] != each.default
    )
