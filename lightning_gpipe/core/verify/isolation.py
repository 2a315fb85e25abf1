"""Isolates the runs of a verification, which must leave training equal to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_gpipe.core.faithful import Attributes, Journal, Manager, Write, preserved, together
from lightning_gpipe.core.pipeline import Pipeline


@contextmanager
def exclusive(pipelines: Sequence[Pipeline]) -> Iterator[None]:
    """Let no other thread run the pipelines in a ``with`` block."""
    with ExitStack() as stack:
        for pipeline in pipelines:
            stack.enter_context(pipeline.engine.exclusive())
            pipeline.patches.reset()  # changes that an interrupted verification left
        yield


def in_chunks(pipelines: Sequence[Pipeline], chunks: int) -> Manager:
    """Run mini-batches in this number of micro-batches in a ``with`` block."""
    return Journal().changed((Attributes(pipeline), "chunks", chunks) for pipeline in pipelines)


def isolated(modules: Iterable[nn.Module], pipelines: Sequence[Pipeline]) -> Manager:
    """Restore at the end of a ``with`` block what running modules and pipelines has changed."""
    devices = pipelines[0].layout.devices_here
    engines = [pipeline.engine.unchanged() for pipeline in pipelines]
    return together([preserved(modules, devices, parameters=True), *engines])


def without_dropout(modules: Iterable[nn.Module], journal: Journal) -> Manager:
    """Disable the dropouts among ``modules`` in a ``with`` block, so that they draw nothing."""
    return journal.changed(chain.from_iterable(map(_without_dropout, modules)))


def _without_dropout(module: nn.Module) -> Iterator[Write]:
    match module:
        case _DropoutNd():
            yield Attributes(module), "p", 0.0  # for layers that read p and do not call the module
            # With other training flags, a stage records another behavior than that of training.
            yield Attributes(module), "training", False
        case nn.RNNBase() | nn.MultiheadAttention():
            yield Attributes(module), "dropout", 0.0
