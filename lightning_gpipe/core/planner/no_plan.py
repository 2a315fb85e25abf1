"""The error if no plan fits the devices: the missing memory, and the nearest plan that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gpipe.core.layout import SHARDINGS
from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.search import PlanSearch
from lightning_gpipe.core.planner.settings import PlannedSettings
from lightning_gpipe.core.schedules import KINDS, counted

_GIB = 2**30
_NAMED = 4  # devices in a message; of more, the others are counted


class NoPlan(ValueError):
    """No plan fits the memory of the devices.

    Attributes:
        nearest: The plan that lacks least where it lacks most.
        needed: The bytes per device with which it fits.
        fitting: Plans that fit, see :func:`fitting_plans`; empty if no number of devices would do.
    """

    def __init__(self, nearest: Prediction, fitting: Sequence[Prediction] = ()) -> None:
        self.nearest, self.fitting = nearest, tuple(fitting)
        self.needed = max(stage.needed for stage in nearest.stages)
        super().__init__(
            "a plan must fit the memory of the devices: none does. The nearest one, "
            f"{nearest.settings}, lacks {_lacking(nearest)}; it fits devices of "
            f"{self.needed / _GIB:.3g} GiB. {_cure(nearest, fitting)}"
        )

    def as_dict(self) -> dict[str, Any]:
        missing = [
            {"device": stage.device, "stage": j, "bytes": stage.missing}
            for j, stage in enumerate(self.nearest.stages)
            if stage.missing
        ]
        return {
            "error": str(self),
            "missing": missing,
            "needed": self.needed,
            "nearest": self.nearest.as_dict(),
            "fitting": [plan.as_dict() for plan in self.fitting],
        }


def fitting_plans(search: PlanSearch) -> list[Prediction]:
    """Return plans that fit, the cheapest first.

    First on the same devices: with other numbers, with more of what is divided among replicas, with
    activations on the host, or with another schedule. If these do not fit, with weights on the
    host, and on as few more devices as possible, each like the largest.
    """
    free = replace(search, stages=None, balance=None, chunks=None, activation_checkpointing=None)
    measured = tuple(filter(search.is_measured, KINDS))
    most = search.sharding[-1]
    more = SHARDINGS[SHARDINGS.index(most) + 1 :] if search.replicas > 1 else ()
    divided = [replace(free, sharding=(sharding,)) for sharding in more]
    most_divided = replace(free, sharding=(*search.sharding, *more))
    offloaded = replace(most_divided, offload=(False, "auto"))
    for other in (free, *divided, offloaded, replace(offloaded, orders=measured)):
        if other != search and (fastest := other.fastest(other.candidates())) is not None:
            return [fastest]
    hosted = replace(offloaded, weights=("host",))
    on_more = _on_more(most_divided) or _on_more(replace(most_divided, orders=measured))
    return [plan for plan in (hosted.fastest(hosted.candidates()), on_more) if plan is not None]


def _on_more(free: PlanSearch) -> Prediction | None:
    largest = max(free.places, key=lambda place: place.memory)
    few, enough = len(free.places), free.layers  # few do not fit

    def on(devices: int) -> PlanSearch:
        more = [largest] * (devices - len(free.places))
        return replace(free, places=(*free.places, *more), stages=devices)

    if few >= enough or not _fits(on(enough)):
        return None
    between = range(few + 1, enough)
    least = on(few + 1 + bisect_left(between, True, key=lambda number: _fits(on(number))))
    return least.fastest(least.candidates())


def _fits(search: PlanSearch) -> bool:
    """Return True if a stage on each device fits with the settings that need the least memory."""
    n = len(search.places)
    for order in search.orders:
        m = search.numbers_of_micro_batches(n, order)[-1]
        least = PlannedSettings(n, m, (m,) * n, order, sharding=search.sharding[-1])
        if not any(search.predicted(least).missing):
            return True
    return False


def _lacking(nearest: Prediction) -> str:
    """The missing memory of each device, the most first, with the last of its stages."""
    of_device = {stage.device: (stage.missing, -j, stage) for j, stage in enumerate(nearest.stages)}
    lacking = sorted((each for each in of_device.values() if each[0]), reverse=True)
    named = [
        f"{lack / _GIB:.3g} GiB on device {stage.device} (stage {-j}: "
        f"{stage.needed / _GIB:.3g} of {stage.limit / _GIB:.3g} GiB)"
        for lack, j, stage in lacking[:_NAMED]
    ]
    others = len(lacking) - len(named)
    return ", ".join(named) + (f", and less on {others} others" if others else "")


def _cure(nearest: Prediction, fitting: Sequence[Prediction]) -> str:
    held = sum(stage.memory.held for stage in nearest.stages)
    fewer = held <= sum(place.memory for place in nearest.places)  # else no batch would fit
    if not fitting:
        more = "No number of devices like these would do. Use devices with more memory"
        return f"{more}, or batches with fewer rows." if fewer else f"{more}."
    plans = "; or ".join(_would_do(nearest, plan) for plan in fitting)
    return f"{plans}. Or use batches with fewer rows." if fewer else f"{plans}."


def _would_do(nearest: Prediction, plan: Prediction) -> str:
    devices = dict(zip(plan.devices, plan.places, strict=True)).values()
    sizes = sorted({f"{place.memory / _GIB:.3g}" for place in devices}, key=float)
    of = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    loss = ""
    if plan.settings.order.by_micro_batch and not nearest.settings.order.by_micro_batch:
        loss = ", with which each micro-batch has a loss of its own"
    return f"{counted(len(devices), 'device')} of {of} GiB would do, with {plan.settings}{loss}"
