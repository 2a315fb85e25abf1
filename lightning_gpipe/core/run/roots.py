"""Where backward through a stage starts, and how it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

Root = GradientEdge | Tensor


def root_of(leaf: Any) -> Root | None:
    """Where backward of an output starts: an edge of the graph, which keeps no tensor alive."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    node = leaf.grad_fn
    if node is None:
        return get_gradient_edge(leaf)
    # Before torch 2.9 backward cannot start at the edge of a node that is written in Python.
    written_in_python = isinstance(node, torch._C._FunctionBase)
    return leaf if written_in_python else GradientEdge(node, leaf.output_nr)


def run_backward(roots: Sequence[Root | None], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from those roots that have a gradient.

    This is what ``torch.autograd.backward`` does after it has checked its arguments, which takes as
    long as backward through a small layer.
    """
    given = [
        (r, g) for r, g in zip(roots, gradients, strict=True) if r is not None and g is not None
    ]
    if given:
        starts, values = zip(*given, strict=True)
        _engine_run_backward(
            starts, values, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
