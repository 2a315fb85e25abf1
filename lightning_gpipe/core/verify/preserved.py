"""Leaves a pipeline as it was, and keeps its dropouts from drawing, while it is run for a look.

Whoever runs a pipeline moves things on: buffers, random generators, what the pipeline knows of its
latest mini-batch. A training run that is verified must be the training run that is not, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_gpipe.core.faithful import (
    Attributes,
    Buffers,
    Journal,
    Manager,
    Write,
    default_generator,
)
from lightning_gpipe.core.pipeline import GPipe


@contextmanager
def state_preserved(pipeline: GPipe) -> Iterator[None]:
    """Undo at the end of a ``with`` block what running the pipeline or its layers has changed.

    What layers do to their parameters, or to anything but buffers and PyTorch's generators, stays.
    """
    generators = [default_generator(d) for d in {torch.device("cpu"), *pipeline.devices}]
    states = [generator.get_state() for generator in generators]
    buffers = Buffers(pipeline.modules(), copied=lambda place: True)
    try:
        with pipeline.engine.unchanged():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        buffers.restore()
        torch.clear_autocast_cache()  # its copies of weights belong to a graph that is gone


def without_dropout(modules: Iterable[nn.Module], journal: Journal) -> Manager:
    """Let the dropouts among ``modules`` keep everything, and draw nothing, in a ``with`` block.

    Args:
        modules: The modules.
        journal: Where the changes are recorded.
    """
    return journal.changed(chain.from_iterable(map(_without_dropout, modules)))


def _without_dropout(module: nn.Module) -> Iterator[Write]:
    match module:
        case _DropoutNd():
            yield Attributes(module), "p", 0.0  # for layers that only read it
            # A stage tells training modes apart: it learns nothing of the real one.
            yield Attributes(module), "training", False
        case nn.RNNBase() | nn.MultiheadAttention():
            yield Attributes(module), "dropout", 0.0
