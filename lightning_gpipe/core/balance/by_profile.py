"""The costs of layers that were measured, for the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gpipe.core.balance.costs import LayerCosts, Place, Transfer
from lightning_gpipe.core.balance.profiles import ModelProfile
from lightning_gpipe.core.layout import Around, layer_ranges
from lightning_gpipe.core.schedules import ActivationCheckpointing, recomputed_by_stage


@dataclass(frozen=True)
class StageCosts:
    """The costs of a stage for a mini-batch.

    Attributes:
        time: The time of forward, recomputation and backward of all micro-batches, in ``unit``.
        memory: The bytes at the peak.
        unit: ``"s"`` or ``"FLOP"``.
    """

    time: float
    memory: float
    unit: Literal["s", "FLOP"]


def stage_costs(
    profile: ModelProfile, balance: Sequence[int], mode: ActivationCheckpointing, around: Around
) -> list[StageCosts]:
    """Return the costs of each stage, one of which has the modules around the layers."""
    outside = len(balance) - 1 if around == "last" else 0
    places = recomputing([Place()] * len(balance), profile, mode)
    times, costs = time_costs(profile).of_stages(balance, places), []
    for j, (place, own) in enumerate(zip(places, layer_ranges(balance), strict=True)):
        memory = memory_costs(profile, place.alive)
        size = sum(memory.times_at(replace(place, extra=place.alive))[own.start : own.stop])
        size += sum(t.time for t in memory.transfers if t.user in own and t.maker not in own)
        size += profile.around.held_bytes if j == outside else 0
        costs.append(StageCosts(profile.chunks * times[j], size, profile.unit))
    return costs


def recomputing(
    places: Sequence[Place], profile: ModelProfile, mode: ActivationCheckpointing
) -> list[Place]:
    """Return the places with the recomputation of their stages.

    Of micro-batches that are recomputed, one is alive at a time. What is extra for a micro-batch is
    the share of them.
    """
    m = profile.chunks
    numbers = recomputed_by_stage(mode, m, len(places))
    return [
        replace(place, alive=max(m - k, min(1, k)), extra=k / m)
        for place, k in zip(places, numbers, strict=True)
    ]


def time_costs(profile: ModelProfile, *, split: bool = False) -> LayerCosts:
    """Return the times of the layers for a micro-batch, with the bytes that they need.

    A recomputation is extra, see :func:`recomputing`. The modules around the layers do not count:
    they run before and after, while all stages wait.
    """
    return LayerCosts(
        profile.times(split=split),
        [layer.held_bytes for layer in profile.layers],
        live=[layer.saved.at(profile.rows) for layer in profile.layers],
        extra=[layer.dropping.at(profile.rows) for layer in profile.layers],
    )


def memory_costs(profile: ModelProfile, alive: float) -> LayerCosts:
    """Return the bytes of the layers at the peak of a mini-batch, in the place of times.

    What is extra is saved for a micro-batch that is alive. At the end of forward each layer holds
    its static bytes and the tensors that it has saved for all micro-batches that are not
    recomputed; of those that are, it saves the tensors of one at a time. A stage keeps its inputs
    from other stages for all micro-batches; where a layer saves them, they are in memory once, for
    the number ``alive``.
    """
    held = [layer.held_bytes for layer in profile.layers]
    saved = [layer.saved.at(profile.rows) for layer in profile.layers]
    carried = [
        Transfer(value.maker, value.user, max(0.0, kept))
        for value in profile.carried
        if (
            kept := profile.chunks * value.size.at(profile.rows)
            - alive * value.saved.at(profile.rows)
        )
    ]
    return LayerCosts(held, held, carried, saved, saved)
