"""torch.compile in tests: whether it works here, and a compiler that counts its graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


def has_dynamo() -> bool:
    """Whether torch.compile works here."""
    try:
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError:
        return False
    return True


def can_compile() -> bool:
    """Whether torch.compile works here, also in a dispatch mode that asks to be ignored."""
    return hasattr(TorchDispatchMode, "ignore_compile_internals") and has_dynamo()


def counting(graphs: list[int]) -> Backend:
    """A compiler that runs what it is given, and records each graph by its number of inputs."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    return backend


def compiled(layer: nn.Module, graphs: list[int]) -> nn.Module:
    """The layer, compiled by a compiler that runs what it is given and counts."""
    return torch.compile(layer, backend=counting(graphs))  # type: ignore[return-value]  # it is a module
