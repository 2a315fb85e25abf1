"""A break in the graph of torch.compile, where it would contain a pipeline.

Dynamo follows all calls of a compiled function, but threads, queues and autograd functions that run
autograd cannot be part of a graph. So it breaks its graph at the pipeline and continues behind it.
Layers that are compiled themselves stay compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Wrap a function so that it breaks the graph of a compiled caller."""
    reason = (
        "a pipeline is not part of a graph: compile its layers one by one instead, "
        "and export with strict=False"
    )
    disabled: _Function = torch.compiler.disable(function, reason=reason)
    return disabled
