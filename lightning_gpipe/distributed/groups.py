"""The process groups of a Trainer: all processes, a pipeline, and one place in all pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_gpipe.core.transport import Lifeline, abort_group
from lightning_gpipe.distributed.group import Group, Watcher
from lightning_gpipe.distributed.ranks import Arrangement

DIMENSIONS = ("data_parallel", "pipeline_parallel")


@dataclass(frozen=True, eq=False)
class ProcessGroups:
    """The process groups of a process.

    Attributes:
        everyone: All processes.
        pipeline: The processes of this pipeline; None if it has one.
        across: The processes with this one's place in all pipelines, for tensors on its device.
        along: The processes of this pipeline, for tensors on its device.
        mesh: All processes, a row for each pipeline.
        lifeline: Watches all processes.
    """

    everyone: Group
    pipeline: Group | None
    across: ProcessGroup
    along: ProcessGroup
    mesh: DeviceMesh
    lifeline: Lifeline

    @property
    def host_groups(self) -> list[Group]:
        """The Gloo groups, for host tensors, each once."""
        return list({id(x): x for x in (self.everyone, self.pipeline) if x is not None}.values())

    def watch(self, watcher: Watcher) -> None:
        """End waits that are in vain, with an error of ``watcher`` that names the failed process.

        Waits in the process group of all processes end too, where Lightning's loops wait.
        """
        for group in self.host_groups:
            group.watchers = list(dict.fromkeys([watcher, self.lifeline]))
        watcher.on_lost_wait(self._abort)

    def leave(self) -> None:
        """Close the connections; a process that waits for this one gets an error."""
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
        for group in (self.across, self.along):
            if group.size() > 1:
                abort_group(group)


def connect(
    arrangement: Arrangement, device_type: str, timeout: timedelta, lost_after: timedelta | None
) -> ProcessGroups:
    """Make the groups, in all processes at once.

    Args:
        arrangement: The places of the processes.
        device_type: The type of their devices.
        timeout: How long live processes wait for one another.
        lost_after: How long a process may be silent until it is lost; None for 30 seconds.
    """
    rows = arrangement.ranks
    everyone = Group(timeout)
    pipeline: Group | None = everyone
    if arrangement.in_each_pipeline == 1:
        pipeline = None
    elif arrangement.replicas > 1:
        pipeline = Group(timeout, rows)
    across = _own_group([list(column) for column in zip(*rows, strict=True)], timeout)
    along = _own_group(rows, timeout)
    mesh = DeviceMesh.from_group(
        [across, along], device_type, torch.tensor(rows), mesh_dim_names=DIMENSIONS
    )
    groups = ProcessGroups(everyone, pipeline, across, along, mesh, Lifeline(lost_after))
    groups.watch(groups.lifeline)
    return groups


def _own_group(ranks: Sequence[list[int]], timeout: timedelta) -> ProcessGroup:
    """Make groups of these ranks, over what the devices need; return that of this process."""
    group, _ = dist.new_subgroups_by_enumeration(list(ranks), timeout=timeout)
    assert group is not None, "each process is in one of them"
    return group
