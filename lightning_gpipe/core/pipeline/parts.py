"""What a GPipe is made of: from what the user gives to layouts, before anything has moved.

What to pipe is found in the model, measured where a balance or a plan goes by that, cut, and laid
out over the devices, in one process or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_gpipe.core.data import MicroBatching, Rows
from lightning_gpipe.core.faithful import check_batch_norms, rows_needed
from lightning_gpipe.core.frontends import choose_devices
from lightning_gpipe.core.pipeline.balancing import balances_for
from lightning_gpipe.core.pipeline.given import Choice, Given
from lightning_gpipe.core.pipeline.measuring import Measuring
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.pipeline.pipelines import Pipelines
from lightning_gpipe.core.pipeline.planning import chosen
from lightning_gpipe.core.pipeline.sampling import entries_with
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.pipeline.taking import check_entries, laid_out, layers_in, take_all
from lightning_gpipe.core.plan import Around, Layout, ModelProfile, folded, looped
from lightning_gpipe.core.profile import Optimizers
from lightning_gpipe.core.run import Threads
from lightning_gpipe.core.transport import Connection, Workers, join_processes


class Parts(NamedTuple):
    """What the pipelines of a GPipe are made of.

    Attributes:
        found: What was taken of the model.
        choice: What was given or planned: chunks, recomputation, order.
        balances: The number of units in each stage, of each.
        layouts: What runs where, of each.
        profiles: What the layers cost, of each; none if nothing was measured.
        connection: To the other processes, if there are several.
    """

    found: Sequence[Taken]
    choice: Choice
    balances: list[list[int]]
    layouts: Sequence[Layout]
    profiles: list[ModelProfile]
    connection: Connection | None

    def check_batch_norms(self) -> None:
        """Refuse batch norms whose statistics cannot be updated once per mini-batch."""
        for layout in self.layouts:
            check_batch_norms(*layers_in(layout))

    def pipelines(
        self, *, microbatching: MicroBatching | None, deferred_batch_norm: bool, threads: Threads
    ) -> Pipelines:
        """The pipelines; the layers are on their devices by now."""

        def pipeline(taken: Taken, layout: Layout, workers: Workers) -> Pipeline:
            return Pipeline(
                layout,
                chunks=self.choice.chunks,
                activation_checkpointing=self.choice.activation_checkpointing,
                microbatching=microbatching or Rows(at_least=rows_needed(taken.module)),
                deferred_batch_norm=deferred_batch_norm,
                threads=threads,
                split_backward=self.choice.split_backward,
                workers=workers,
                connection=self.connection,
                number=self.found.index(taken),
            )

        return Pipelines(self.found, self.layouts, pipeline)


def parts_of(
    model: nn.Module,
    module: str | Taken | Sequence[str | Taken] | None,
    balances: Sequence[Any],
    given: Given,
    *,
    devices: Sequence[str | torch.device] | None,
    around: Around,
    folds: bool,
    microbatching: MicroBatching | None,
    sample: Any,
    optimizer: Optimizers,
    owners: Sequence[int] | None,
    group: ProcessGroup | None,
    lost_after: timedelta | None,
) -> Parts:
    """Take, measure, cut and lay out what runs as pipelines; see :class:`GPipe` for the arguments.

    Processes are joined, if there are several.

    Args:
        model: The user's model.
        module: What of it, as the user gave it.
        balances: The balance of each, as the user gave it.
        given: What else may be planned.
        devices: As the user gave them.
        around: Which stage what is around is with.
        folds: Whether the stages go down the devices and back.
        microbatching: As the user gave it.
        sample: A mini-batch to measure on.
        optimizer: What a balance by memory counts as optimizer state.
        owners: The process of each worker.
        group: The process group of these.
        lost_after: After how long one that is not heard is lost.

    Raises:
        TypeError, ValueError: As GPipe does.
    """
    found = take_all(model, module, balances)
    check_entries(found, microbatching)
    measuring = Measuring(
        found,
        partial(entries_with, found, sample),
        devices or (),
        **given.measured_with(),
        microbatching=microbatching,
        optimizer=optimizer,
    )
    choice = chosen(found, balances, measuring, given, around)
    sizes = balances_for(found, choice.balances, measuring, around)
    parts = [taken.partitions(each) for taken, each in zip(found, sizes, strict=True)]
    workers_on = choose_devices(devices, *map(len, parts))
    connection, rank = join_processes(
        owners, len(workers_on), group, lost_after, [taken.name for taken in found]
    )
    layouts = [
        laid_out(*each, workers_on, around, owners or (), rank, folded if folds else looped)
        for each in zip(found, parts, strict=True)
    ]
    return Parts(found, choice, list(map(list, sizes)), layouts, measuring.done, connection)
