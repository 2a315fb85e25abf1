"""Weights of stages of which each replica keeps a share, the third stage of ZeRO.

The owner of a weight keeps its values, and steps it; others have it on the meta device. The owner
sends them whenever a stage runs, see Note [The same gathers in all replicas], in buckets of one
owner, and a large weight without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_gpipe.core.frontends import forget_values, is_in_another_process, recall, replaceable
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run import DividedWeights
from lightning_gpipe.core.transport import OWN
from lightning_gpipe.distributed.buckets import buckets_of, wait_for
from lightning_gpipe.distributed.ddp import gathered
from lightning_gpipe.distributed.group import Watcher
from lightning_gpipe.distributed.shares import Shares, counts

_WEIGHTS = "the weights that other replicas keep"


class ReplicaWeights(DividedWeights):
    """Gathers the weights of the stages of this process from replicas.

    ``stages`` has the divided weights; each worker of this process has one of the ``groups``.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        layout: Layout,
        groups: Sequence[ProcessGroup],
        shares: Shares,
        watcher: Watcher,
        cap: float,
    ) -> None:
        self._buckets = {j: buckets_of(stages[j], cap, shares) for j in stages}
        self._group_of = dict(zip(layout.workers_here, groups, strict=True))
        self._layout = layout
        self._watcher = watcher

    @override
    @torch.no_grad()
    def gather(self, j: int, leaves: Mapping[int, nn.Parameter]) -> Callable[[], None]:
        group = self._group_of[self._layout.placement[j]]
        sent = []
        for bucket in self._buckets[j]:
            flat, work = bucket.send_values(group)
            sent.append((flat, work))  # the memory stays until the work is done
            if not bucket.is_for(group):
                for parameter, part in zip(bucket.parameters, flat.parts, strict=True):
                    leaves[id(parameter)].data = part
        return partial(self._wait, sent)

    def _wait(self, sent: Iterable[tuple[object, dist.Work]]) -> None:
        wait_for((work for _, work in sent), self._watcher)

    @override
    def agree(self, worker: int, number: int) -> bool:
        group = self._group_of[worker]
        own = counts(group, [number], self._layout.devices[worker])
        numbers = [torch.empty_like(own) for _ in range(group.size())]
        with OWN.next("weights", dist.get_process_group_ranks(group), _WEIGHTS):
            wait_for([dist.all_gather(numbers, own, group=group, async_op=True)], self._watcher)
        return len(set(torch.cat(numbers).tolist())) == 1


def drop_values(root: nn.Module, parameters: Iterable[nn.Parameter], shares: Shares) -> None:
    """Drop the values of parameters that other replicas own."""
    with replaceable(*root.modules()):
        for parameter in parameters:
            if not shares.is_own(parameter):
                forget_values(parameter)


def gather_values(root: nn.Module, group: ProcessGroup, device: torch.device) -> None:
    """Give all replicas the values of parameters that some have, on the host, as after a fit."""
    parameters = list(root.parameters())
    own = counts(group, [not is_in_another_process(x) for x in parameters], device)
    flags = gathered(group, own)
    with replaceable(*root.modules()), torch.no_grad():
        for parameter, *there in zip(parameters, *(x.tolist() for x in flags), strict=True):
            if all(there) or not any(there):  # else other processes of a pipeline have it
                continue
            recall(parameter, torch.device("cpu"))
            value = parameter.detach().to(own.device)
            dist.broadcast(value, group=group, group_src=there.index(1))
            parameter.copy_(value)
