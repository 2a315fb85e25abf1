"""Deferred batch norm: running statistics per mini-batch, not per micro-batch.

A batch norm that runs on micro-batches updates its running statistics once for each of them, from
fewer samples, and again when a micro-batch is recomputed: the trained model differs from the plain
one, without an error. torchgpipe sums x and x² until it has seen a fixed number of micro-batches,
which loses digits to cancellation, gives the biased variance, keeps the sums in the state dict, and
is wrong from the first mini-batch that has fewer micro-batches.

Here a batch norm still normalises by micro-batch, but while the pipeline runs it appends the mean
and the unbiased variance of its input to a list. After all micro-batches these are merged into the
statistics of the mini-batch, and the running statistics are updated once, exactly as they are for a
whole mini-batch. Recomputation records nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager


class Moments(NamedTuple):
    """The moments of the input of one batch norm in one call, for each of C channels."""

    number: float  # of values in each channel
    mean: Tensor  # (C,)
    variance: Tensor  # (C,), unbiased


def check_batch_norms(layers: Iterable[nn.Module]) -> None:
    """Raise if a batch norm has a forward of its own, so that its statistics cannot be deferred.

    Raises:
        ValueError: Names every such batch norm.
    """
    custom = [
        f"{type(module).__name__} in layer {index}"
        for index, layer in enumerate(layers)
        for module in layer.modules()
        if isinstance(module, _BatchNorm) and not _is_plain(module)
    ]
    if custom:
        raise ValueError(
            "deferred_batch_norm=True needs batch norms with PyTorch's own forward: got "
            f"{', '.join(custom)}. Replace them by nn.BatchNorm1d, 2d or 3d, or write "
            "deferred_batch_norm=False to have them updated once per micro-batch."
        )


def rows_needed(module: nn.Module) -> int:
    """The number of rows that a micro-batch must have to train the batch norms in ``module``.

    Two are always enough; one is enough only if there are further dimensions to average over.
    """
    return 2 if any(isinstance(each, _BatchNorm) for each in module.modules()) else 1


class DeferredStatistics:
    """The statistics that the batch norms of one stage collect during one mini-batch."""

    def __init__(self, batch_norms: Iterable[_BatchNorm]) -> None:
        self._calls: dict[_BatchNorm, list[_Forward]] = {bn: [] for bn in batch_norms}
        self._outer = {bn: _deferred_by(bn) for bn in self._calls}

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> DeferredStatistics | None:
        """For the batch norms among ``modules`` that would update statistics; None without any."""
        updating = [
            module
            for module in modules
            if isinstance(module, _BatchNorm)
            and module.training
            and module.running_mean is not None
            and (_is_plain(module) or _deferred_by(module) is not None)
        ]
        return cls(updating) if updating else None

    def collecting(self, journal: Journal, *, record: bool) -> Manager:
        """Defer the updates of the batch norms in a ``with`` block that runs one micro-batch.

        Args:
            journal: Where the change of their forward is recorded.
            record: Whether to record the moments of their inputs; False on recomputation.
        """
        writes: list[Write] = []
        for bn, calls in self._calls.items():
            forward = _Forward(bn)
            if record:
                calls.append(forward)
            writes.append((vars(bn), "forward", forward))
        return journal.changed(writes)

    def commit(self) -> None:
        """Update the running statistics, once for each call that the layers made.

        All batch norms of the stage are updated in one operation, so that Ctrl-C comes before it or
        after it. In a layer of another pipeline, which defers them too, the merged moments are left
        to that pipeline.
        """
        old: list[Tensor] = []
        new: list[Tensor] = []
        for bn, forwards in self._calls.items():
            merged = list(_merged_calls([forward.seen for forward in forwards]))
            outer = self._outer[bn]
            if outer is not None:
                outer.seen += merged
            elif merged:
                found, updated = zip(*_updates(bn, merged), strict=True)
                old += found
                new += updated
        if old:
            torch._foreach_copy_(old, new)


def merge_moments(moments: Iterable[Moments]) -> Moments:
    """The moments of several samples combined.

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


class _Forward:
    """The forward of a batch norm while its statistics are deferred.

    Attributes:
        seen: The moments of its inputs so far, one for each call.
    """

    def __init__(self, bn: _BatchNorm) -> None:
        self._bn = bn
        self.seen: list[Moments] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Run the batch norm in training, and append its input's moments, not to its buffers."""
        bn = self._bn
        bn._check_input_dim(x)
        assert bn.running_mean is not None and bn.running_var is not None
        mean, variance = torch.zeros_like(bn.running_mean), torch.zeros_like(bn.running_var)
        y = F.batch_norm(x, mean, variance, bn.weight, bn.bias, True, 1.0, bn.eps)
        self.seen.append(Moments(x.numel() / x.size(1), mean, variance))
        return y


def _merged_calls(microbatches: Sequence[Sequence[Moments]]) -> Iterator[Moments]:
    """The moments of the whole mini-batch, for each call that the layers made."""
    for call in range(max(map(len, microbatches), default=0)):
        yield merge_moments([seen[call] for seen in microbatches if call < len(seen)])


def _updates(bn: _BatchNorm, calls: Iterable[Moments]) -> Iterator[tuple[Tensor, Tensor]]:
    """The buffers of a batch norm, each with its value after these calls."""
    assert bn.running_mean is not None and bn.running_var is not None
    mean, variance, number = bn.running_mean, bn.running_var, bn.num_batches_tracked
    for moments in calls:
        factor = bn.momentum
        if number is not None:
            number = number + 1
            if factor is None:  # a cumulative average
                factor = 1.0 / float(number)
        mean = mean.lerp(moments.mean, factor or 0.0)
        variance = variance.lerp(moments.variance, factor or 0.0)
    yield bn.running_mean, mean
    yield bn.running_var, variance
    if bn.num_batches_tracked is not None and number is not None:
        yield bn.num_batches_tracked, number


def _deferred_by(module: _BatchNorm) -> _Forward | None:
    """The forward that another pipeline, of which this one is a layer, has given the batch norm."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, _Forward) else None


def _is_plain(module: _BatchNorm) -> bool:
    return type(module).forward is _BatchNorm.forward and "forward" not in vars(module)
