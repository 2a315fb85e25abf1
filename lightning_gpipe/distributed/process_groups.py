"""The process groups that a process is in, made in all processes at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # not in the stubs
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

from lightning_gpipe.core.layout import TENSOR_PARALLEL
from lightning_gpipe.core.transport import Lifeline, abort_group
from lightning_gpipe.distributed.arrangement import Arrangement
from lightning_gpipe.distributed.comparison import check_same
from lightning_gpipe.distributed.group import Group, Watcher


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """The process groups that a process is in."""

    everyone: Group
    replica: Group | None  # the processes with the same batches; None for a single one
    pipeline: Group | None  # None for a single one
    # For tensors on devices:
    across: ProcessGroup  # the processes with this one's place in all replicas
    along: ProcessGroup  # those of this pipeline
    stage: ProcessGroup  # those of this one's stage in its replica, each with a shard of it
    reductions: ProcessGroup | None  # as across, for gradients that leave while others use that
    mesh: DeviceMesh  # all, by replica, place in a pipeline, and shard
    # As across: for moments of batch norms by the rows of all replicas, one for each worker and one
    # for modules around the stages; for weights that replicas have divided, one for each worker.
    of_norms: Sequence[ProcessGroup]
    of_weights: Sequence[ProcessGroup]
    lifeline: Lifeline  # watches all processes
    stages: _StageGroup  # makes that of the stage, for all Trainers of this process

    @property
    def host_groups(self) -> list[Group]:
        """The Gloo groups, for host tensors, each once."""
        groups = self.everyone, self.replica, self.pipeline
        return list({id(x): x for x in groups if x is not None}.values())

    def watch(self, watcher: Watcher) -> None:
        """End waits that are in vain, those of Lightning's loops too, by errors of ``watcher``."""
        for group in self.host_groups:
            group.watchers = list(dict.fromkeys([watcher, self.lifeline]))
        watcher.on_lost_wait(self._abort)

    def expect_failures(self) -> None:
        """Wait for no explanation of network errors, since this process fails."""
        for group in self.host_groups:
            group.watchers = ()

    def leave(self) -> None:
        for group in self.host_groups:
            group.leave()
        self._abort_device_groups()
        self.lifeline.close()

    def _abort(self) -> None:
        for group in self.host_groups:
            group.abort()
        if dist.group.WORLD is not None:
            abort_group(dist.group.WORLD)
        self._abort_device_groups()

    def _abort_device_groups(self) -> None:
        self.stages.abort(self.stage)
        of_workers = *self.of_norms, *self.of_weights
        for group in (self.across, self.along, self.reductions, *of_workers):
            if group is not None and group.size() > 1 and group is not dist.group.WORLD:
                abort_group(group)


def connect(
    arrangement: Arrangement,
    device_type: str,
    timeout: timedelta,
    lost_after: timedelta | None,
    facts: Mapping[str, Any],
    *,
    synchronised: bool = False,
    divided: bool = False,
) -> ProcessGroups:
    """Make the groups, in all processes at once; their ``facts`` must be the same.

    Live processes wait for one another for ``timeout``, silent ones are lost after ``lost_after``.
    ``synchronised``: batch norms normalise by the rows of all replicas; ``divided``: replicas
    divide weights.
    """
    ranks = arrangement.ranks
    rows: list[list[int]] = ranks.transpose(1, 2).flatten(0, 1).tolist()
    columns: list[list[int]] = ranks.flatten(1).T.tolist()
    everyone = Group(timeout)
    check_same(everyone, facts)
    replica = _host_group(ranks.flatten(1).tolist(), timeout, everyone)
    pipeline = Group(timeout, rows) if arrangement.tensor_parallel > 1 else replica
    across = _own_group(columns, timeout)
    # It has the same processes as the process group of all, and only the user's code uses either.
    shared = dist.group.WORLD if pipeline is everyone else None
    along = shared or _own_group(rows, timeout)
    assert dist.group.WORLD is not None, "it is initialised"
    stages = _stage_group(dist.group.WORLD, tuple(map(tuple, ranks.flatten(0, 1).tolist())))
    stage = stages.connected(everyone)
    reductions = _own_group(columns, timeout) if arrangement.replicas > 1 else None
    names = ("data_parallel", "pipeline_parallel", TENSOR_PARALLEL)
    mesh = DeviceMesh.from_group([across, along, stage], device_type, ranks, mesh_dim_names=names)
    workers = arrangement.devices // arrangement.on_each_node
    of_norms = [_own_group(columns, timeout) for _ in range(synchronised * (workers + 1))]
    of_weights = [_own_group(columns, timeout) for _ in range(divided * workers)]
    lifeline = Lifeline(lost_after)
    groups = ProcessGroups(
        everyone,
        replica,
        pipeline,
        across,
        along,
        stage,
        reductions,
        mesh,
        of_norms,
        of_weights,
        lifeline,
        stages,
    )
    groups.watch(groups.lifeline)
    made = [group.process_group for group in groups.host_groups]
    made += [across, along, reductions, *of_norms, *of_weights]
    of_torch = [group.group_name for group in made if group not in (None, dist.group.WORLD)]
    weakref.finalize(groups, _destroy, of_torch).atexit = False
    return groups


def _destroy(names: Iterable[Any]) -> None:
    """End the threads of these groups, which torch.distributed would keep."""
    for name in names:
        with suppress(RuntimeError, ValueError):  # it has been destroyed
            dist.destroy_process_group(_resolve_process_group(name))


class _StageGroup:
    """The group of this process's stage, the same one for all Trainers of the process.

    Divided layers, compiled ones and DTensor's caches keep the name of the first one, also those
    of later Trainers, whose meshes are equal. After a fit that has failed it leads to a new group.
    """

    def __init__(self, stages: list[list[int]]) -> None:
        self._stages = stages
        self._names: list[Any] = []  # of all groups so far
        self._group: ProcessGroup | None = None

    def connected(self, everyone: Group) -> ProcessGroup:
        """Return the group, in all processes at once: a new one if one has aborted it."""
        if everyone.decide(self._group is None, all=False):
            if self._group is not None:
                self.abort(self._group)
            _destroy(self._names[-1:])
            group, _ = dist.new_subgroups_by_enumeration(self._stages)
            assert group is not None, "each process is in one of them"
            for name in self._names:
                with suppress(RuntimeError):  # it has been destroyed
                    _unregister_process_group(name)
                _register_process_group(name, group)
            self._names.append(group.group_name)
            self._group = group
        assert self._group is not None, "it is made"
        return self._group

    def abort(self, group: ProcessGroup) -> None:
        if group.size() > 1:
            abort_group(group)
            if group is self._group:
                self._group = None


@cache
def _stage_group(world: ProcessGroup, stages: tuple[tuple[int, ...], ...]) -> _StageGroup:
    return _StageGroup([[*ranks] for ranks in stages])


def _host_group(ranks: list[list[int]], timeout: timedelta, everyone: Group) -> Group | None:
    if len(ranks[0]) == 1:
        return None
    return everyone if len(ranks) == 1 else Group(timeout, ranks)


def _own_group(ranks: Sequence[list[int]], timeout: timedelta) -> ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(list(ranks), timeout=timeout)
    assert group is not None, "each process is in one of them"
    return group
