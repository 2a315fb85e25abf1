"""Plans for a model: its layers are measured, with micro-batches of several sizes.

A layer takes less time for each row of a large micro-batch; how much less no formula knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, takewhile
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_gpipe.core.balance import ModelProfile, Place
from lightning_gpipe.core.data import MicroBatching
from lightning_gpipe.core.layout import (
    SHARDINGS,
    Around,
    ShardingName,
    Weights,
    check_around,
    check_balance,
)
from lightning_gpipe.core.pipeline.choose.balancing import balances_for
from lightning_gpipe.core.pipeline.choose.measuring import LayerMeasurement
from lightning_gpipe.core.pipeline.choose.options import AUTO, Requested, Resolved
from lightning_gpipe.core.pipeline.choose.sampling import Entry
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.planner import Plan, plan_for
from lightning_gpipe.core.profile import Optimizers, host_speed
from lightning_gpipe.core.schedules import (
    ActivationCheckpointing,
    OffloadActivations,
    ScheduleKind,
    ScheduleName,
    check_planned,
)

_MOST = 16  # micro-batches per stage: then the bubble is 6 % at most
_COPIED = 2**26  # bytes, at most, to measure the way from the host
_USABLE = 0.9  # of a GPU's memory: its libraries and the gaps between tensors take the rest


def resolve(
    modules: Sequence[PipedModule],
    balances: Sequence[Any],
    requested: Requested,
    entries: Callable[[], Sequence[Entry]],
    devices: Sequence[str | torch.device],
    *,
    around: Around,
    microbatching: MicroBatching | None,
    optimizer: Optimizers,
    agree: Callable[[Any], Any] = lambda value: value,
    measured: bool = False,
) -> Resolved:
    """Plan the settings that the user leaves open, and count the units in each stage.

    See :class:`LayerMeasurement` for ``entries`` and ``devices``. ``agree`` returns the first
    process's value in each process. With ``measured`` layers are measured even if no balance needs
    it. Raises NoPlan if nothing fits, or a TypeError or ValueError for several pipelines or a wrong
    balance.
    """
    chunks, mode = requested.chunks, requested.activation_checkpointing
    measuring = LayerMeasurement(
        modules,
        entries,
        list(map(torch.device, devices)),
        chunks=1 if chunks == AUTO else chunks,  # a balance by memory needs a number
        activation_checkpointing="except_last" if mode == AUTO else mode,
        microbatching=microbatching,
        optimizer=optimizer,
        states=1.0 if requested.sharding is None else 1 / requested.replicas,
        split=requested.needs_split_costs,
        by_rows=bool(requested.planned),
    )
    resolved: Resolved = agree(_with_plan(measuring, balances, requested, around))
    sizes = agree(balances_for(measuring, resolved.balances, around))
    profiles = measuring.profiles if measured else measuring.done
    return resolved._replace(balances=list(map(list, sizes)), profiles=profiles)


def _with_plan(
    measuring: LayerMeasurement, balances: Sequence[Any], requested: Requested, around: Around
) -> Resolved:
    chunks, mode, schedule, split, weights, offload, *_ = requested
    if (
        chunks != AUTO
        and mode != AUTO
        and schedule != AUTO
        and split != AUTO
        and weights != AUTO
        and offload != AUTO
    ):
        order = ScheduleKind.of(schedule, split=split)
        return Resolved(list(balances), chunks, mode, order, weights, offload)
    planned = " and ".join(requested.planned)
    if len(modules := measuring.modules) > 1:
        raise ValueError(
            f"a plan, as of {planned}, must be for one pipeline: got {len(modules)}, "
            f"{', '.join(piped.name for piped in modules)}. Write what you want in its place."
        )
    if not measuring.devices:
        raise ValueError(
            f"a plan, as of {planned}, must be for devices: got devices=None. Write "
            "devices=['cuda:0', 'cuda:1']."
        )
    by_time = balances[0] == "time"
    balance = None if by_time else balances_for(measuring, balances, around)[0]
    places = [_place(device, requested) for device in measuring.devices]
    plan = plan_measured(measuring, places, requested, None, balance, around, every_device=True)
    settings, sizes = plan.settings, plan.prediction.rows
    measuring.done = [replace(plan.prediction.profile, rows=max(sizes), chunks=len(sizes))]
    return Resolved(
        [list(settings.balance)],
        settings.chunks,
        settings.activation_checkpointing,
        settings.order,
        settings.weights,
        settings.offload_activations,
        plan,
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
    weights: Weights | Literal["auto"] = "device",
    offload_activations: OffloadActivations | Literal["auto"] = False,
    sharding: ShardingName | Literal["auto"] | None = "auto",
    replicas: int = 1,
) -> Plan:
    """Choose how to run a model as a pipeline: the least predicted time that fits.

    Example::

        best = plan(layers, x, [Place(memory=24 * 2**30)] * 8, optimizer=torch.optim.AdamW)
        print(best)
        best.prediction.stages[0].memory

    The devices need not be there: the layers are measured one by one on ``device``, as by
    :func:`~lightning_gpipe.profile`.

    Args:
        model, sample, module, device, microbatching: See :func:`~lightning_gpipe.profile`.
        devices: The number of devices of a pipeline, or the memory and speed of each.
        stages: The number of stages; None tries up to one per device and, with weights on the host,
            several on each.
        balance: The number of layers in each stage, with one or several stages on each device; None
            finds the best one.
        chunks: The number of micro-batches; None tries powers of two.
        activation_checkpointing: Which of them are recomputed; None finds as few as fit.
        schedule: The schedule; ``"auto"`` chooses also among those with a loss for each
            micro-batch, which are among the alternatives otherwise.
        split_backward: Whether the gradients of the weights are computed apart; None chooses.
        optimizer: The optimizer whose state counts; None counts none.
        around: Which stage's device has the modules around the layers.
        weights, offload_activations: The tensors in the memory of the host, see
            :class:`~lightning_gpipe.GPipe`; ``"auto"`` chooses.
        sharding: What replicas divide, see :class:`~lightning_gpipe.GPipeStrategy`; ``"auto"``
            chooses the least that fits.
        replicas: The number of pipelines, each on devices like these.

    Raises:
        TypeError, ValueError: If the model cannot be cut, or an argument is wrong.
        NoPlan: If nothing fits; says what is missing where, and what would fit.
    """
    requested = Requested(
        AUTO if chunks is None else chunks,
        AUTO if activation_checkpointing is None else activation_checkpointing,
        schedule,
        AUTO if split_backward is None else split_backward,
        weights,
        offload_activations,
        sharding,
        replicas,
    )
    requested.check()
    check_around(around)
    places = [Place()] * devices if isinstance(devices, int) else list(devices)
    if not places:
        raise ValueError(f"devices must be one at least: got {devices!r}. Write devices=2.")
    measuring = LayerMeasurement.of_model(
        model,
        module,
        sample,
        [torch.device(device)] * len(places),
        microbatching=microbatching,
        optimizer=optimizer,
        split=True,
    )
    if balance is not None:
        balance = measuring.modules[0].frontend.in_units(balance)
    return plan_measured(measuring, places, requested, stages, balance, around)


def plan_measured(
    measuring: LayerMeasurement,
    places: Sequence[Place],
    requested: Requested,
    stages: int | None,
    balance: Sequence[int] | None,
    around: Around,
    per_second: float | None = None,
    *,
    every_device: bool = False,
) -> Plan:
    """Measure the layers, for up to one stage per place or those of the balance, and plan the rest.

    Operations that are counted become seconds by the number ``per_second``. With
    ``every_device``, each device must have a stage.
    """
    chunks, mode, schedule, split, weights, offload, sharding, replicas = requested
    requested.check()
    for name, number in (("stages", stages), ("replicas", replicas)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be 1 or more: got {number}.")
    if balance is not None:
        (piped,) = measuring.modules
        check_balance(balance, len(piped.frontend.units), piped.name)
    check_planned(schedule)
    assert isinstance(schedule, str), "a block is not planned"
    m, n = None if chunks == AUTO else chunks, len(balance or places)
    profiles = _profiles(measuring, m, n)
    if per_second is not None:
        profiles = [profile.in_seconds(per_second) for profile in profiles]
    return plan_for(
        profiles,
        places,
        most=measuring.most(_MOST * n),
        stages=stages,
        balance=balance,
        chunks=m,
        activation_checkpointing=None if mode == AUTO else mode,
        schedule=schedule,
        split_backward=None if split == AUTO else split,
        around=around,
        weights=get_args(Weights) if weights == AUTO else (weights,),
        offload=(False, AUTO) if offload == AUTO else (offload,),
        sharding=(SHARDINGS if replicas > 1 else (None,)) if sharding == AUTO else (sharding,),
        replicas=replicas,
        every_device=every_device,
    )


def _profiles(measuring: LayerMeasurement, chunks: int | None, stages: int) -> list[ModelProfile]:
    """Measure the layers with micro-batches of as many sizes as a plan needs, if they fit."""
    if chunks is not None:
        return measuring.at([chunks])
    most = 1 if measuring.counts else measuring.most(_MOST * stages)
    numbers = list(takewhile(most.__ge__, (4**k for k in count())))
    while True:
        try:
            return measuring.at(numbers)
        except torch.OutOfMemoryError:
            if len(numbers) == 1:
                raise
            del numbers[0]  # of which the micro-batches are the largest


def _place(device: torch.device, requested: Requested) -> Place:
    place = Place(memory=_USABLE * memory_of(device))
    on_device = requested.weights == "device" and requested.offload_activations is False
    if device.type != "cuda" or on_device:
        return place
    copied = min(_COPIED, int(place.memory / 64))
    return replace(place, host_speed=host_speed(device, copied))


def memory_of(device: torch.device) -> float:
    """Return the bytes that this process may use of a GPU; inf for a CPU, which shares them."""
    if device.type != "cuda":
        return inf
    total = float(torch.cuda.get_device_properties(device).total_memory)
    return total * torch.cuda.get_per_process_memory_fraction(device)
