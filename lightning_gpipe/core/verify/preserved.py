"""Preserves the state of a pipeline while it is verified, and disables its dropouts.

To run a pipeline changes buffers, random generators and what the pipeline has recorded. A training
run that is verified must be equal to the bit to one that is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_gpipe.core.faithful import (
    Attributes,
    Journal,
    Manager,
    Write,
    preserved,
)
from lightning_gpipe.core.verify.runs import Subject
from lightning_gpipe.core.verify.whole import Whole


@contextmanager
def state_preserved(pipeline: Subject | Whole) -> Iterator[None]:
    """Restore at the end of a ``with`` block what running the pipeline or its layers has changed.

    These are buffers, the generators of PyTorch, NumPy and Python, what layers keep in attributes
    and generators, and the pipeline's records. Other changes by layers, as to their parameters, are
    not undone.
    """
    modules = (module for layer in pipeline for module in layer.modules())
    with (
        preserved(modules, pipeline.devices, buffers_of=pipeline.modules()),
        pipeline.unchanged(),
    ):
        yield


def without_dropout(modules: Iterable[nn.Module], journal: Journal) -> Manager:
    """Disable the dropouts among ``modules`` in a ``with`` block, so that they draw nothing.

    Args:
        modules: The modules.
        journal: Where the changes are recorded.
    """
    return journal.changed(chain.from_iterable(map(_without_dropout, modules)))


def _without_dropout(module: nn.Module) -> Iterator[Write]:
    match module:
        case _DropoutNd():
            yield Attributes(module), "p", 0.0  # for layers that read p and do not call the module
            # With other training flags, a stage records another behavior than that of training.
            yield Attributes(module), "training", False
        case nn.RNNBase() | nn.MultiheadAttention():
            yield Attributes(module), "dropout", 0.0
