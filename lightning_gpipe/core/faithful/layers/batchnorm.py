"""Deferred batch norm: running statistics per mini-batch, not per micro-batch.

A batch norm that runs on micro-batches updates its running statistics once for each of them, and
again in a recomputation: the trained model differs from the plain one, without an error. Sums of x
and x² would lose digits to cancellation.

Here a batch norm still normalises by micro-batch, or by the rows of all replicas, but records the
mean and the unbiased variance of its input, though not in a recomputation. These are merged after
all micro-batches, and the running statistics are updated once, exactly as for a whole mini-batch;
those of an instance norm, averages over the rows, as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_gpipe.core.faithful.journal import Journal, Write, patched
from lightning_gpipe.core.faithful.layers.replicated_norm import (
    Gather,
    Moments,
    merge_moments,
    replicated_norm,
    wide,
)
from lightning_gpipe.core.faithful.managers import Manager

Norm = _BatchNorm | _InstanceNorm


def check_batch_norms(layers: Sequence[nn.Module], titles: Sequence[str]) -> None:
    """Refuse batch norms with a forward of their own, whose statistics cannot be deferred."""
    custom = [
        f"{type(module).__name__} in {title}"
        for layer, title in zip(layers, titles, strict=True)
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
    """Return the rows that a micro-batch must have to train the batch norms in ``module``.

    Two are always enough; one is enough only if there are further dimensions to average over.
    """
    return 2 if any(isinstance(each, _BatchNorm) for each in module.modules()) else 1


class DeferredStatistics:
    """The statistics of one stage's norms in a mini-batch, over replicas if there is ``gather``."""

    def __init__(self, norms: Iterable[Norm], gather: Gather | None = None) -> None:
        self._calls: dict[Norm, list[_RecordingForward]] = {norm: [] for norm in norms}
        self._outer = {norm: _deferred_by(norm) for norm in self._calls}
        self._gather = gather

    @classmethod
    def of(cls, norms: Iterable[Norm], gather: Gather | None = None) -> DeferredStatistics | None:
        """Collect for the norms that would update statistics; return None without any."""
        running = [
            norm
            for norm in norms
            if norm.training
            and (_has_updates(norm) or (gather and isinstance(norm, _BatchNorm)))
            and (_is_plain(norm) or _deferred_by(norm) is not None)
        ]
        return cls(running, gather) if running else None

    def collecting(self, journal: Journal, *, record: bool) -> Manager:
        """Defer the updates of norms in a ``with`` block; a recomputation has no ``record``."""
        writes: list[Write] = []
        for norm, calls in self._calls.items():
            forward = _RecordingForward(norm, self._gather)
            if record:
                calls.append(forward)
            writes.append((vars(norm), _method_of(norm), forward))
        return journal.changed(writes)

    def commit(self) -> None:
        """Update the running statistics, once for each call that the layers made.

        All norms are updated in one operation, so that Ctrl-C comes before or after it. A layer of
        another pipeline, which defers them too, leaves the merged moments to that pipeline.
        """
        old: list[Tensor] = []
        new: list[Tensor] = []
        for norm, forwards in self._calls.items():
            by_row = isinstance(norm, _InstanceNorm)
            calls = zip_longest(*[forward.moments for forward in forwards])
            merged = [merge_moments(filter(None, parts), by_row=by_row) for parts in calls]
            outer = self._outer[norm]
            if outer is not None:
                outer.moments += merged
            elif merged and _has_updates(norm):
                buffers, values = zip(*_updates(norm, merged), strict=True)
                old += buffers
                new += values
        if old:
            torch._foreach_copy_(old, new)


class _RecordingForward:
    """The forward of a norm while its statistics are deferred."""

    def __init__(self, norm: Norm, gather: Gather | None) -> None:
        self._norm = norm
        self._gather = gather
        self.moments: list[Moments] = []  # of its inputs so far, for each call

    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if self._gather is not None and isinstance(norm, _BatchNorm):
            y, moments = replicated_norm(norm, x, self._gather)
            self.moments.append(moments)
            return y
        norm._check_input_dim(x)
        assert norm.running_mean is not None and norm.running_var is not None
        # At least in single precision, as PyTorch's kernels: sums in half lose digits or overflow.
        dtype = wide(norm.running_mean.dtype)
        mean = torch.zeros_like(norm.running_mean, dtype=dtype)
        variance = torch.zeros_like(norm.running_var, dtype=dtype)
        weight, bias = (p if p is None else p.to(dtype) for p in (norm.weight, norm.bias))
        by_batch = isinstance(norm, _BatchNorm)
        function = F.batch_norm if by_batch else F.instance_norm
        y = function(x, mean, variance, weight, bias, True, 1.0, norm.eps)
        number = x.numel() / x.size(1) if by_batch else x.size(0)
        self.moments.append(Moments(number, mean, variance))
        return y


def over_replicas(norms: Iterable[_BatchNorm], gather: Gather) -> Manager:
    """Let batch norms that train normalise by the rows of all replicas, in a ``with`` block."""
    training = (norm for norm in norms if norm.training)
    return patched(
        [
            (vars(norm), "forward", partial(_forward_over_replicas, norm, gather))
            for norm in training
        ]
    )


def _forward_over_replicas(norm: _BatchNorm, gather: Gather, x: Tensor) -> Tensor:
    y, moments = replicated_norm(norm, x, gather)
    if _has_updates(norm):
        for buffer, value in _updates(norm, [moments]):
            buffer.copy_(value)
    return y


def _has_updates(norm: Norm) -> bool:
    """Return True if the norm, in training, updates running statistics.

    A batch norm may have some and not track them, as in Lightning's ``BaseFinetuning.freeze``.
    """
    tracks = norm.track_running_stats or isinstance(norm, _InstanceNorm)
    return tracks and norm.running_mean is not None


def _updates(norm: Norm, calls: Iterable[Moments]) -> Iterator[tuple[Tensor, Tensor]]:
    assert norm.running_mean is not None and norm.running_var is not None
    dtype = wide(norm.running_mean.dtype)
    mean, variance = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    counted = norm.num_batches_tracked if isinstance(norm, _BatchNorm) else None
    number = counted
    for moments in calls:
        factor = norm.momentum
        if number is not None:
            number = number + 1
            if factor is None:  # a cumulative average
                factor = 1.0 / float(number)
        mean = mean.lerp(moments.mean, factor or 0.0)
        variance = variance.lerp(moments.variance, factor or 0.0)
    yield norm.running_mean, mean.to(norm.running_mean.dtype)
    yield norm.running_var, variance.to(norm.running_var.dtype)
    if counted is not None and number is not None:
        yield counted, number


def _method_of(norm: Norm) -> str:
    """Return the method that gets a batch; an instance norm adds the dim of one row before it."""
    return "forward" if isinstance(norm, _BatchNorm) else "_apply_instance_norm"


def _deferred_by(norm: Norm) -> _RecordingForward | None:
    """Return the method that an outer pipeline, of which this one is a layer, gave the norm."""
    forward = vars(norm).get(_method_of(norm))
    return forward if isinstance(forward, _RecordingForward) else None


def _is_plain(norm: Norm) -> bool:
    kind: Any = _BatchNorm if isinstance(norm, _BatchNorm) else _InstanceNorm
    return all(
        getattr(type(norm), name) is getattr(kind, name) and name not in vars(norm)
        for name in ("forward", _method_of(norm))
    )
