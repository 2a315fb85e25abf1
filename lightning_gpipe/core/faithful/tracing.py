"""Whether a call is not a run, but is recorded: by torch.jit.trace, torch.export or torch.fx.

A tracer follows one call on one thread and writes down its operators. What it shall see is the
model, as ``Trainer(logger=TensorBoardLogger(log_graph=True))`` draws it and ``torch.export`` saves
it: the layers in order, on any number of rows. Micro-batches, and the autograd functions that
connect the stages, are no part of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Proxy

_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def is_traced(input: Any) -> bool:
    """Whether a call with this input is recorded, or made with tensors that have no values."""
    return (
        torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)
        or _has_proxy(input)
    )


def _has_proxy(input: Any) -> bool:
    """Whether torch.fx passed this input; faster than to flatten it, since every step asks."""
    if isinstance(input, dict):
        input = tuple(input.values())
    if isinstance(input, (tuple, list)):
        return any(map(_has_proxy, input))
    return isinstance(input, Proxy)
