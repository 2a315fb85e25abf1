"""Plans for a model: its layers are measured, the planner chooses.

A layer takes less time for each row of a large micro-batch, but how much less no formula knows. So
the layers are measured with micro-batches of several sizes, each of which serves those near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, check_chunks, check_microbatching
from lightning_gpipe.core.pipeline.balancing import balances_for
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
    check_activation_checkpointing,
    check_around,
    plan_for,
)
from lightning_gpipe.core.profile import Optimizers

AUTO: Literal["auto"] = "auto"
_MOST = 16  # micro-batches per stage: then the bubble is 6 % at most
_USABLE = 0.9  # of a GPU's memory: its libraries and the gaps between tensors take the rest


class Choice(NamedTuple):
    """What a pipeline is made with.

    Attributes:
        balances: The balance of each module.
        chunks: The number of micro-batches.
        activation_checkpointing: Which of them are recomputed.
        plan: The plan that says so; None if the user did.
    """

    balances: list[Any]
    chunks: int
    activation_checkpointing: ActivationCheckpointing
    plan: Plan | None = None


def check_auto(chunks: Any, activation_checkpointing: Any) -> None:
    """Check both, which may be ``"auto"``.

    Raises:
        TypeError, ValueError: If they have the wrong type, or a value that they cannot have.
    """
    if chunks != AUTO:
        check_chunks(chunks)
    if activation_checkpointing != AUTO:
        check_activation_checkpointing(activation_checkpointing)


def measured_with(chunks: Any, activation_checkpointing: Any) -> dict[str, Any]:
    """The arguments of :class:`Measuring` for both, one of which may be ``"auto"``.

    A balance by memory goes by one number of micro-batches.
    """
    return {
        "chunks": 1 if chunks == AUTO else chunks,
        "activation_checkpointing": (
            "except_last" if activation_checkpointing == AUTO else activation_checkpointing
        ),
    }


def chosen(
    found: Sequence[Taken],
    balances: Sequence[Any],
    measuring: Measuring,
    chunks: int | Literal["auto"],
    activation_checkpointing: ActivationCheckpointing | Literal["auto"],
    around: Around,
) -> Choice:
    """What a pipeline is made with, planned where the user leaves it.

    Args:
        found: What runs as pipelines.
        balances: Their balances, as the user gave them.
        measuring: Measures them; knows the devices.
        chunks: As the user gave it.
        activation_checkpointing: As the user gave it.
        around: Which stage what is around is with.

    Raises:
        ValueError: If there are several pipelines.
        NoPlan: If nothing fits the devices.
    """
    if chunks != "auto" and activation_checkpointing != "auto":
        return Choice(list(balances), chunks, activation_checkpointing)
    if len(found) > 1:
        raise ValueError(
            "chunks='auto' and activation_checkpointing='auto' plan one pipeline: got "
            f"{len(found)}, {', '.join(taken.name for taken in found)}. Write numbers."
        )
    if not measuring.devices:
        raise ValueError(
            "chunks='auto' and activation_checkpointing='auto' plan for devices, so they must be "
            "given: got devices=None. Write devices=['cuda:0', 'cuda:1']."
        )
    balance = None
    if balances[0] != "time":
        balance = balances_for(found, balances, measuring, around)[0]
    places = [_place(device) for device in measuring.devices]
    n = len(balance or places)
    profiles = profiles_of(measuring, None if chunks == AUTO else chunks, n)
    plan = plan_for(
        profiles,
        places,
        rows=rows_of(profiles),
        most=measuring.most(_MOST * n),
        stages=n,
        balance=balance,
        chunks=None if chunks == AUTO else chunks,
        activation_checkpointing=(
            None if activation_checkpointing == AUTO else activation_checkpointing
        ),
        around=around,
    )
    settings, sizes = plan.settings, plan.prediction.rows
    measuring.done = [replace(plan.prediction.profile, rows=max(sizes), chunks=len(sizes))]
    return Choice(
        [list(settings.balance)], settings.chunks, settings.activation_checkpointing, plan
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
        balance: The number of layers in each stage; None finds the best one.
        chunks: The number of micro-batches; None tries powers of two.
        activation_checkpointing: Which of them are recomputed; None finds as few as fit.
        microbatching: How a mini-batch is cut, see :class:`~lightning_gpipe.GPipe`.
        optimizer: What counts as optimizer state; None counts none.
        around: Which stage what is around the layers is with.

    Raises:
        TypeError, ValueError: If the model cannot be cut, or an argument is wrong.
        NoPlan: If nothing fits; says what is missing where, and what would fit.
    """
    check_auto(AUTO if chunks is None else chunks, activation_checkpointing or AUTO)
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
