"""Isolates the runs of a verification, which must leave training equal to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_gpipe.core.faithful import (
    Attributes,
    Manager,
    Write,
    patched,
    preserved,
    together,
)
from lightning_gpipe.core.pipeline import Pipeline


@contextmanager
def exclusive(pipelines: Sequence[Pipeline]) -> Iterator[None]:
    """Let no other thread run the pipelines in a ``with`` block."""
    with ExitStack() as stack:
        for pipeline in pipelines:
            stack.enter_context(pipeline.engine.exclusive())
        yield


def in_chunks(pipelines: Sequence[Pipeline], chunks: int) -> Manager:
    """Run mini-batches in this number of micro-batches in a ``with`` block."""
    return patched((Attributes(pipeline), "chunks", chunks) for pipeline in pipelines)


def isolated(modules: Iterable[nn.Module], pipelines: Sequence[Pipeline]) -> Manager:
    """Restore at the end of a ``with`` block what running modules and pipelines has changed."""
    devices = pipelines[0].layout.devices_here
    engines = [pipeline.engine.unchanged() for pipeline in pipelines]
    return together([preserved(modules, devices, parameters=True), *engines])


def by_rows(modules: Iterable[nn.Module], *, sampled: bool) -> Manager:
    """Disable the dropouts among ``modules`` in a ``with`` block, so that they draw nothing.

    If ``sampled``, others of PyTorch whose results depend on the micro-batches do as in evaluation,
    where they do not: they would hide what the layers after them do.
    """
    writes = map(_evaluating if sampled else _without_dropout, modules)
    return patched(chain.from_iterable(writes))


def of_micro_batches(module: nn.Module) -> str | None:
    """Return what makes the results of a module depend on the micro-batches, if that is known."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return "which normalises by micro-batch"
    norms = (module, *module._forward_pre_hooks.values())
    if module.training and any(isinstance(x, _SpectralNorm | SpectralNorm) for x in norms):
        return "whose power iteration advances with each micro-batch"
    return None


def _evaluating(module: nn.Module) -> Iterator[Write]:
    if isinstance(module, nn.RReLU) or of_micro_batches(module):
        yield Attributes(module), "training", False
    yield from _without_dropout(module)


def _without_dropout(module: nn.Module) -> Iterator[Write]:
    match module:
        case _DropoutNd():
            yield Attributes(module), "p", 0.0  # for layers that read p and do not call the module
            # With other training flags, a stage records another behavior than that of training.
            yield Attributes(module), "training", False
        case nn.RNNBase() | nn.MultiheadAttention():
            yield Attributes(module), "dropout", 0.0
