"""Restores everything that running modules has changed, however they are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gpipe.core.faithful.random.random_state import RandomState
from lightning_gpipe.core.faithful.state.stage_state import ModuleState


@contextmanager
def preserved(
    modules: Iterable[nn.Module],
    devices: Iterable[torch.device],
    *,
    buffers_of: Iterable[nn.Module] | None = None,
) -> Iterator[None]:
    """Restore at the end of a ``with`` block what running modules has changed.

    These are buffers, the generators of PyTorch, NumPy and Python, and what modules keep in
    attributes and generators. Other changes, as to their parameters, are not undone.

    Args:
        modules: The modules.
        devices: Where they run.
        buffers_of: The modules whose buffers are restored, if those are others.
    """
    random_state = RandomState.capture(devices)
    state = ModuleState.capture(modules, buffers_of=buffers_of)
    try:
        yield
    finally:
        random_state.restore()
        state.restore()
        torch.clear_autocast_cache()  # its copies of weights belong to a graph that was freed
