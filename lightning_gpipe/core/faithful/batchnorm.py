"""Deferred batch norm: running statistics per mini-batch, not per micro-batch.

A batch norm that is fed micro-batches updates its running statistics once for each of them, from
fewer samples, and again when a micro-batch is recomputed: the model that comes out of training
differs from the plain one, without an error. Summing x and x² until a fixed number of micro-batches
was seen, as torchgpipe does, cancels digits, ends in the biased variance, keeps its sums in the
state dict, and slips out of step with the first mini-batch that has fewer micro-batches.

Here a batch norm still normalises by micro-batch, but while the pipeline runs it writes the mean
and the unbiased variance of what it sees into a list. When all micro-batches are through, those are
merged into the statistics of the mini-batch and the module's buffers take one step, exactly as they
would have for the whole mini-batch. Recomputation writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager


class Moments(NamedTuple):
    """What one batch norm saw in one call: so many values for each of C channels."""

    number: float
    mean: Tensor  # (C,)
    variance: Tensor  # (C,), unbiased


def check_batch_norms(layers: Iterable[nn.Module]) -> None:
    """Raise if a batch norm computes in its own way, so that its statistics cannot be deferred.

    Raises:
        ValueError: Names every one.
    """
    own = [
        f"{type(module).__name__} in layer {index}"
        for index, layer in enumerate(layers)
        for module in layer.modules()
        if isinstance(module, _BatchNorm) and not _is_plain(module)
    ]
    if own:
        raise ValueError(
            "deferred_batch_norm=True needs batch norms with PyTorch's own forward: got "
            f"{', '.join(own)}. Replace them by nn.BatchNorm1d, 2d or 3d, or write "
            "deferred_batch_norm=False to have them updated once per micro-batch."
        )


def rows_needed(module: nn.Module) -> int:
    """How many rows a micro-batch must have for the batch norms in ``module`` to train on it.

    One may be enough, if it has further dimensions; two always are.
    """
    return 2 if any(isinstance(each, _BatchNorm) for each in module.modules()) else 1


class DeferredStatistics:
    """What the batch norms of one stage see of one mini-batch."""

    def __init__(self, batch_norms: Iterable[_BatchNorm]) -> None:
        self._calls: dict[_BatchNorm, list[list[Moments]]] = {bn: [] for bn in batch_norms}

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> DeferredStatistics | None:
        """For the batch norms among ``modules`` that would update statistics now, if any."""
        updating = [
            module
            for module in modules
            if isinstance(module, _BatchNorm)
            and module.training
            and module.running_mean is not None
            and _is_plain(module)
        ]
        return cls(updating) if updating else None

    def collecting(self, journal: Journal, *, record: bool) -> Manager:
        """Keep the batch norms from updating in a ``with`` block that runs one micro-batch.

        Args:
            journal: Where the change of their forward is recorded.
            record: Whether to record what they see; False on recomputation.
        """
        writes: list[Write] = []
        for bn, calls in self._calls.items():
            seen: list[Moments] = []
            if record:
                calls.append(seen)
            writes.append((vars(bn), "forward", partial(_normalise, bn, seen)))
        return journal.changed(writes)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics, once for each call that the layers made."""
        for bn, microbatches in self._calls.items():
            for call in range(max(map(len, microbatches), default=0)):
                _update(
                    bn, merge_moments([seen[call] for seen in microbatches if call < len(seen)])
                )


def merge_moments(moments: Iterable[Moments]) -> Moments:
    """The moments of several samples taken together.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979), for any number of samples at once.
    """
    parts = list(moments)
    total = sum(part.number for part in parts)
    mean = torch.zeros_like(parts[0].mean)
    for number, own, _ in parts:
        mean += own * (number / total)
    spread = torch.zeros_like(mean)
    for number, own, variance in parts:
        spread += variance * (number - 1) + (own - mean) ** 2 * number
    return Moments(total, mean, spread / (total - 1))


def _normalise(bn: _BatchNorm, seen: list[Moments], x: Tensor) -> Tensor:
    """Forward of a training batch norm that writes what it saw to ``seen``, not to its buffers."""
    bn._check_input_dim(x)
    assert bn.running_mean is not None and bn.running_var is not None
    mean, variance = torch.zeros_like(bn.running_mean), torch.zeros_like(bn.running_var)
    y = F.batch_norm(x, mean, variance, bn.weight, bn.bias, True, 1.0, bn.eps)
    seen.append(Moments(x.numel() / x.size(1), mean, variance))
    return y


def _update(bn: _BatchNorm, moments: Moments) -> None:
    assert bn.running_mean is not None and bn.running_var is not None
    factor = bn.momentum
    if bn.num_batches_tracked is not None:
        bn.num_batches_tracked.add_(1)
        if factor is None:  # a cumulative average
            factor = 1.0 / float(bn.num_batches_tracked)
    bn.running_mean.lerp_(moments.mean, factor or 0.0)
    bn.running_var.lerp_(moments.variance, factor or 0.0)


def _is_plain(module: _BatchNorm) -> bool:
    return type(module).forward is _BatchNorm.forward and "forward" not in vars(module)
