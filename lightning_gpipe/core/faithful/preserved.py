"""Restores what running modules has changed, however they are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gpipe.core.faithful.buffers import Buffers
from lightning_gpipe.core.faithful.library_generators import LibraryGenerators
from lightning_gpipe.core.faithful.redirect import default_generator
from lightning_gpipe.core.faithful.state import AttributesPreserved


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
    modules = tuple(modules)
    found = {torch.device("cpu"), *(device for device in devices if device.type != "meta")}
    generators = [default_generator(device) for device in found]
    states = [generator.get_state() for generator in generators]
    library = LibraryGenerators()
    library_state = library.get_state()
    buffers = Buffers(modules if buffers_of is None else buffers_of, copied=lambda slot: True)
    try:
        with AttributesPreserved(modules):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        library.set_state(library_state)
        buffers.restore()
        torch.clear_autocast_cache()  # its copies of weights belong to a graph that was freed
