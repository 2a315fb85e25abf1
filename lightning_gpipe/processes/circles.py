"""The process groups of a Trainer: everyone, a pipeline, and the same place in all pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_gpipe.core.transport import Lifeline, end_waits
from lightning_gpipe.processes.arrangement import Arrangement
from lightning_gpipe.processes.group import Group, Watcher

DIMENSIONS = ("data_parallel", "pipeline_parallel")


@dataclass(frozen=True, eq=False)
class Circles:
    """The groups that a process is in.

    Attributes:
        everyone: All processes.
        pipeline: Those of this pipeline; None if it has one.
        across: Those with the place of this process in all pipelines, for tensors on its device.
        along: Those of this pipeline, for tensors on its device.
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
    def groups(self) -> list[Group]:
        """Those for what is not on a device."""
        return list({id(x): x for x in (self.everyone, self.pipeline) if x is not None}.values())

    def watch(self, watcher: Watcher) -> None:
        """Let waits end when they are in vain, with the name of the process that has failed.

        Those in the process group of all processes end too, where Lightning's loops wait.

        Args:
            watcher: The lifeline, or the pipeline, which knows the stages of its processes.
        """
        for group in self.groups:
            group.watchers = list(dict.fromkeys([watcher, self.lifeline]))
        watcher.when_in_vain(self._end_waits)

    def leave(self) -> None:
        """Close the connections; whoever waits for this process gets an error."""
        for group in self.groups:
            group.leave()
        self._end_waits_across()
        self.lifeline.close()

    def _end_waits(self) -> None:
        for each in self.groups:
            each.end_waits()
        if dist.group.WORLD is not None:
            end_waits(dist.group.WORLD)
        self._end_waits_across()

    def _end_waits_across(self) -> None:
        for group in (self.across, self.along):
            if group.size() > 1:
                end_waits(group)


def connect(
    arrangement: Arrangement, device_type: str, timeout: timedelta, lost_after: timedelta | None
) -> Circles:
    """Make the groups, in all processes at once.

    Args:
        arrangement: Which processes there are.
        device_type: That of their devices.
        timeout: How long processes that live wait for one another.
        lost_after: After how long one that is not heard is lost.
    """
    rows = arrangement.ranks
    everyone = Group(timeout)
    pipeline: Group | None = everyone
    if arrangement.in_each_pipeline == 1:
        pipeline = None
    elif arrangement.replicas > 1:
        pipeline = Group(timeout, rows)
    across = _own([list(column) for column in zip(*rows, strict=True)], timeout)
    along = _own(rows, timeout)
    mesh = DeviceMesh.from_group(
        [across, along], device_type, torch.tensor(rows), mesh_dim_names=DIMENSIONS
    )
    found = Circles(everyone, pipeline, across, along, mesh, Lifeline(lost_after))
    found.watch(found.lifeline)
    return found


def _own(ranks: Sequence[list[int]], timeout: timedelta) -> ProcessGroup:
    """Of groups of these ranks, that of this process, over what the devices need."""
    group, _ = dist.new_subgroups_by_enumeration(list(ranks), timeout=timeout)
    assert group is not None, "each process is in one of them"
    return group
