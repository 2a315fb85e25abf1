"""A break in the graph of torch.compile, where it would contain a pipeline.

Dynamo follows Python calls into everything that a compiled function calls, and what it would find
here (threads, queues, autograd functions that run autograd) is not for a graph. It breaks its graph
at the pipeline and continues behind it. Layers that are compiled themselves stay compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """The function, which breaks the graph of a caller that is compiled."""
    reason = (
        "a pipeline is not part of a graph: compile its layers one by one instead, "
        "and export with strict=False"
    )
    disabled: _Function = torch.compiler.disable(function, reason=reason)
    return disabled
