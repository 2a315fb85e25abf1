"""Plans for a model: its layers are measured, the planner chooses.

A layer takes less time for each row of a large micro-batch, but how much less no formula knows. So
the layers are measured with micro-batches of several sizes, each of which serves those near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, check_microbatching
from lightning_gpipe.core.pipeline.balancing import balances_for
from lightning_gpipe.core.pipeline.given import AUTO, Choice, Given
from lightning_gpipe.core.pipeline.measuring import Measuring
from lightning_gpipe.core.pipeline.sampling import entries_with
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.pipeline.taking import take
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    Around,
    ModelProfile,
    Place,
    Plan,
    ScheduleName,
    check_around,
    plan_for,
)
from lightning_gpipe.core.profile import Optimizers

_MOST = 16  # micro-batches per stage: then the bubble is 6 % at most
_USABLE = 0.9  # of a GPU's memory: its libraries and the gaps between tensors take the rest


def chosen(
    found: Sequence[Taken],
    balances: Sequence[Any],
    measuring: Measuring,
    given: Given,
    around: Around,
) -> Choice:
    """What a pipeline is made with, planned where the user leaves it.

    Args:
        found: What runs as pipelines.
        balances: Their balances, as the user gave them.
        measuring: Measures them; knows the devices.
        given: What the user has said.
        around: Which stage what is around is with.

    Raises:
        ValueError: If there are several pipelines.
        NoPlan: If nothing fits the devices.
    """
    if not given.planned:
        return given.choice._replace(balances=list(balances))
    asked = " and ".join(given.planned)
    if len(found) > 1:
        raise ValueError(
            f"a plan, as of {asked}, must be for one pipeline: got {len(found)}, "
            f"{', '.join(taken.name for taken in found)}. Write what you want in its place."
        )
    if not measuring.devices:
        raise ValueError(
            f"a plan, as of {asked}, must be for devices: got devices=None. Write "
            "devices=['cuda:0', 'cuda:1']."
        )
    balance = None
    if balances[0] != "time":
        balance = balances_for(found, balances, measuring, around)[0]
    plan = _plan(measuring, list(map(_place, measuring.devices)), balance, given, around)
    settings, sizes = plan.settings, plan.prediction.rows
    measuring.done = [replace(plan.prediction.profile, rows=max(sizes), chunks=len(sizes))]
    return Choice(
        [list(settings.balance)],
        settings.chunks,
        settings.activation_checkpointing,
        settings.order,
        plan,
    )


def _plan(
    measuring: Measuring,
    places: Sequence[Place],
    balance: Sequence[int] | None,
    given: Given,
    around: Around,
) -> Plan:
    """The plan for devices with a stage each, or with those of a balance."""
    mode, split = given.activation_checkpointing, given.split_backward
    chunks = None if given.chunks == AUTO else given.chunks
    n = len(balance or places)
    profiles = profiles_of(measuring, chunks, n)
    return plan_for(
        profiles,
        places,
        rows=rows_of(profiles),
        most=measuring.most(_MOST * n),
        stages=n,
        balance=balance,
        chunks=chunks,
        activation_checkpointing=None if mode == AUTO else mode,
        schedule=given.schedule,
        split_backward=None if split == AUTO else split,
        around=around,
    )


def plan(
    model: nn.Module,
    sample: Any,
    devices: int | Sequence[Place],
    *,
    module: str | None = None,
    device: str | torch.device = "cpu",
    stages: int | None = None,
    balance: Sequence[int] | None = None,
    chunks: int | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    schedule: ScheduleName | Literal["auto"] = "fill_drain",
    split_backward: bool | None = None,
    microbatching: MicroBatching | None = None,
    optimizer: Optimizers = None,
    around: Around = "last",
) -> Plan:
    """Choose how to run a model as a pipeline, with the least predicted time that fits.

    Example::

        found = plan(layers, x, [Place(memory=24 * 2**30)] * 8, optimizer=torch.optim.AdamW)
        print(found)
        found.prediction.stages[0].memory

    The devices need not be there: the layers are measured one by one on ``device``, as by
    :func:`~lightning_gpipe.profile`.

    Args:
        model: The model.
        sample: A mini-batch as the model is called with, see :func:`~lightning_gpipe.profile`.
        devices: Their number, or for each its memory and its speed.
        module: The path of what is to run as a pipeline; None takes the model itself.
        device: Where to measure; on ``"meta"`` operations are counted.
        stages: Their number; None takes up to one per device.
        balance: The number of layers in each stage, with one or several stages on each device; None
            finds the best one.
        chunks: The number of micro-batches; None tries powers of two.
        activation_checkpointing: Which of them are recomputed; None finds as few as fit.
        schedule: What runs when; ``"auto"`` chooses also among those with a loss for each
            micro-batch, which are among the alternatives otherwise.
        split_backward: Whether the gradients of the weights are computed apart; None chooses.
        microbatching: How a mini-batch is cut, see :class:`~lightning_gpipe.GPipe`.
        optimizer: What counts as optimizer state; None counts none.
        around: Which stage what is around the layers is with.

    Raises:
        TypeError, ValueError: If the model cannot be cut, or an argument is wrong.
        NoPlan: If nothing fits; says what is missing where, and what would fit.
    """
    mode = AUTO if activation_checkpointing is None else activation_checkpointing
    Given(AUTO if chunks is None else chunks, mode, schedule).check()
    check_microbatching(microbatching)
    check_around(around)
    places = [Place()] * devices if isinstance(devices, int) else list(devices)
    if not places:
        raise ValueError(f"devices must be one at least: got {devices!r}. Write devices=2.")
    taken = take(model, module)
    measuring = Measuring(
        [taken],
        partial(entries_with, [taken], sample),
        [device] * len(places),
        microbatching=microbatching,
        optimizer=optimizer,
        split=True,
    )
    profiles = profiles_of(measuring, chunks, len(places))
    return plan_for(
        profiles,
        places,
        rows=rows_of(profiles),
        most=measuring.most(_MOST * len(places)),
        stages=stages,
        balance=balance,
        chunks=chunks,
        activation_checkpointing=activation_checkpointing,
        schedule=schedule,
        split_backward=split_backward,
        around=around,
    )


def profiles_of(measuring: Measuring, chunks: int | None, stages: int) -> list[ModelProfile]:
    """What the layers cost, with micro-batches of as many sizes as a plan needs.

    Args:
        measuring: Measures them.
        chunks: The number of micro-batches, if it is given.
        stages: The number of stages, at most.
    """
    if chunks is not None:
        return [measuring.at(chunks)]
    found = [measuring.at(1)]
    m = 4  # each measures half of its rows, too
    while m <= measuring.most(_MOST * stages) and not measuring.counts:
        found.append(measuring.at(m))
        m *= 4
    return found


def rows_of(profiles: Sequence[ModelProfile]) -> int:
    """The number of rows of the mini-batch that was measured."""
    return profiles[0].rows * profiles[0].chunks


def _place(device: torch.device) -> Place:
    """A device as it is."""
    if device.type != "cuda":
        return Place(memory=inf)
    return Place(memory=_USABLE * torch.cuda.get_device_properties(device).total_memory)
