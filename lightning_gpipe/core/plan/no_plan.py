"""What to do if no plan fits the devices: what is missing where, and the nearest plan that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_gpipe.core.plan.balance.costs import Place
from lightning_gpipe.core.plan.candidates import Asked, Candidate
from lightning_gpipe.core.plan.orders import ORDERS
from lightning_gpipe.core.plan.prediction import Prediction
from lightning_gpipe.core.plan.search import Search

_GIB = 2**30
_NAMED = 4  # devices in a message; of more, the others are counted


class NoPlan(ValueError):
    """No plan fits the memory of the devices.

    Attributes:
        nearest: The one that lacks least where it lacks most.
        needed: The bytes per device with which it fits.
        fitting: The nearest plan that fits: on these devices, if something else was given too much
            of, or else on more of the largest of them; None if no number of them would do.
    """

    def __init__(self, nearest: Prediction, fitting: Prediction | None = None) -> None:
        self.nearest, self.fitting = nearest, fitting
        self.needed = max(stage.needed for stage in nearest.stages)
        super().__init__(
            "a plan must fit the memory of the devices: none does. The nearest one, "
            f"{nearest.settings}, lacks {_lacking(nearest)}; it fits devices of "
            f"{self.needed / _GIB:.3g} GiB. {_cure(nearest, fitting)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, as for JSON."""
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
            "fitting": None if self.fitting is None else self.fitting.as_dict(),
        }


def that_fits(asked: Asked) -> Prediction | None:
    """The nearest plan that fits, if nothing fits that was asked for.

    On the same devices, a plan that does not keep what was given, if possible but for the
    schedule; or else the fastest one with as few more devices as can be, each like the largest.
    None if no number of them would do.
    """
    free = replace(asked, stages=None, balance=None, chunks=None, activation_checkpointing=None)
    others = replace(free, orders=tuple(filter(asked.known, ORDERS)))
    for given in (free, others):
        if given != asked and (found := _fastest(given)) is not None:
            return found
    return _on_more(free) or _on_more(others)


def _on_more(free: Asked) -> Prediction | None:
    """The fastest plan on as few more devices as can be; None if no number of them would do."""
    largest = max(free.places, key=lambda place: place.memory)
    few, enough = len(free.places), free.layers
    if few >= enough or not _fits(_with(free, enough, largest)):
        return None
    while enough - few > 1:  # fewer do not fit, that many do
        middle = (few + enough) // 2
        if _fits(_with(free, middle, largest)):
            enough = middle
        else:
            few = middle
    return _fastest(_with(free, enough, largest))


def _with(asked: Asked, devices: int, place: Place) -> Asked:
    """The same, with a stage on each of so many devices; those that come to it are like one."""
    more = devices - len(asked.places)
    return replace(asked, places=(*asked.places, *[place] * more), stages=devices)


def _fits(asked: Asked) -> bool:
    """Whether a stage on each device fits, if that is to have the least memory."""
    n, search = len(asked.places), Search(asked)
    for order in asked.orders:
        m = asked.numbers_of_micro_batches(n, order)[-1]
        if not any(search.predicted(Candidate(n, m, m, order)).missing):
            return True
    return False


def _fastest(asked: Asked) -> Prediction | None:
    search = Search(asked)
    best = search.fastest(asked.candidates())
    return None if best is None else search.predicted(best)


def _lacking(nearest: Prediction) -> str:
    """What is missing where, the most first."""
    stages = enumerate(nearest.stages)
    lacking = sorted(((each.missing, -j, each) for j, each in stages if each.missing), reverse=True)
    named = [
        f"{lack / _GIB:.3g} GiB on device {stage.device} (stage {-j}: "
        f"{stage.needed / _GIB:.3g} of {stage.limit / _GIB:.3g} GiB)"
        for lack, j, stage in lacking[:_NAMED]
    ]
    others = len(lacking) - len(named)
    return ", ".join(named) + (f", and less on {others} others" if others else "")


def _cure(nearest: Prediction, fitting: Prediction | None) -> str:
    """What would fit."""
    if fitting is None:
        return (
            "No number of devices like these would do. Use devices with more memory, or batches "
            "with fewer rows."
        )
    sizes = sorted({f"{place.memory / _GIB:.3g}" for place in fitting.places}, key=float)
    of = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    devices = len(fitting.places)
    loss = ""
    if fitting.settings.order.by_micro_batch and not nearest.settings.order.by_micro_batch:
        loss = ", with which each micro-batch has a loss of its own"
    return (
        f"{devices} device{'s' if devices > 1 else ''} of {of} GiB would do, with "
        f"{fitting.settings}{loss}. Or use batches with fewer rows."
    )
