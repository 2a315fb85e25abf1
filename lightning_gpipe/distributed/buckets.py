"""The parameters whose gradients replicas average apart, or whose values they send, in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_gpipe.core.data import from_shard, shard_of
from lightning_gpipe.core.faithful import has_hooks
from lightning_gpipe.core.layout import Layout, tensors_within
from lightning_gpipe.core.run import own_parameters
from lightning_gpipe.core.transport import is_broken_connection
from lightning_gpipe.distributed.group import FAILURE_TIMEOUT, Watcher
from lightning_gpipe.distributed.shares import Shares


def divisible(root: nn.Module, layout: Layout) -> dict[int, list[nn.Parameter]]:
    """Return the parameters of each stage of this process whose values replicas can divide.

    Those of one stage only, dense, of no class of a library, and without hooks on gradients.
    """

    def is_plain(parameter: nn.Parameter) -> bool:
        plain = type(parameter) is nn.Parameter
        return plain and not has_hooks(parameter) and not any(tensors_within(vars(parameter)))

    stages = own_parameters(root, layout, frozen=True)
    return {j: list(filter(is_plain, stages[j])) for j in stages}


class Bucket(NamedTuple):
    """Parameters of one dtype and device, whose gradients all replicas get, or their owner."""

    parameters: list[nn.Parameter]
    owner: int | None
    device: torch.device

    def empty(self) -> Flat:
        flat = self._memory()
        flat.values.zero_()
        return flat

    def send_values(self, group: ProcessGroup) -> tuple[Flat, Any]:
        """Send the values of the parameters from their owner; return them, and the collective."""
        alone = self.parameters[0].detach()
        if not self.is_for(group):
            flat = self._memory()
        elif len(self.parameters) == 1 and alone.is_contiguous():
            flat = Flat(alone.view(-1), [alone])
        else:
            flat = self._memory()
            for parameter, part in zip(self.parameters, flat.parts, strict=True):
                part.copy_(parameter.detach())
        return flat, dist.broadcast(flat.values, group=group, group_src=self.owner, async_op=True)

    def _memory(self) -> Flat:
        sizes = [shard_of(p).numel() for p in self.parameters]
        values = torch.empty(sum(sizes), dtype=self.parameters[0].dtype, device=self.device)
        pieces = zip(self.parameters, values.split(sizes), strict=True)
        return Flat(values, [_as(parameter, piece) for parameter, piece in pieces])

    def sum(self, flat: Flat, group: ProcessGroup, *, async_op: bool = False) -> Any:
        """Add gradients up over the replicas that get them; elsewhere the values are lost."""
        if self.owner is None:
            return dist.all_reduce(flat.values, group=group, async_op=async_op)
        return dist.reduce(flat.values, group=group, group_dst=self.owner, async_op=async_op)

    def is_for(self, group: ProcessGroup) -> bool:
        return self.owner is None or self.owner == group.rank()


class Flat(NamedTuple):
    """The memory of a bucket, and the part of each parameter in its shape."""

    values: Tensor
    parts: Sequence[Tensor]


def buckets_of(
    parameters: Iterable[nn.Parameter], cap: float, shares: Shares | None
) -> list[Bucket]:
    """Divide parameters into buckets of some bytes each, by their owners if there are shares."""
    buckets: list[Bucket] = []
    open_of: dict[Any, tuple[Bucket, float]] = {}
    for parameter in parameters:
        owner = None if shares is None else shares.owner_of(parameter)
        device = parameter.device if shares is None else shares.device_of(parameter)
        key = parameter.dtype, device, owner
        bucket, size = open_of.get(key, (Bucket([], owner, device), cap))
        if size >= cap:
            bucket, size = Bucket([], owner, device), 0
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        open_of[key] = bucket, size + shard_of(parameter).nbytes
    return buckets


def wait_for(works: Iterable[Any], watcher: Watcher) -> None:
    """Wait for collectives; an error by which they fail names a process."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        failure = watcher.failure(FAILURE_TIMEOUT) if is_broken_connection(error) else None
        raise error if failure is None else failure from error


def _as(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Return a part of a bucket in the shape of a parameter, and dense in the order of its dims."""
    shard = torch.empty_like(shard_of(parameter), device="meta")
    part = piece.as_strided(shard.shape, shard.stride(), piece.storage_offset())
    return from_shard(part, parameter)
