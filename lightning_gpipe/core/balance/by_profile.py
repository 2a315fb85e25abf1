"""The costs of layers that were measured, for the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_gpipe.core.balance.costs import LayerCosts, Transfer, sums_of
from lightning_gpipe.core.balance.profiles import ModelProfile
from lightning_gpipe.core.layout import Around, layer_ranges
from lightning_gpipe.core.schedules import ActivationCheckpointing, count_recomputed


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
    recomputed = count_recomputed(mode, profile.chunks)
    times = sums_of(time_costs(profile, recomputed).times, balance)
    memory = memory_costs(profile, recomputed)
    held = sums_of(memory.times, balance)
    for j, own in enumerate(layer_ranges(balance)):
        held[j] += sum(t.time for t in memory.transfers if t.user in own and t.maker not in own)
    held[-1 if around == "last" else 0] += profile.around.held_bytes
    pairs = zip(times, held, strict=True)
    return [StageCosts(profile.chunks * time, size, profile.unit) for time, size in pairs]


def time_costs(profile: ModelProfile, recomputed: int, *, split: bool = False) -> LayerCosts:
    """Return the times of the layers for a micro-batch, with the bytes that they need.

    The modules around the layers do not count: they run before and after, while all stages wait.
    """
    times = profile.times(recomputed=recomputed / profile.chunks, split=split)
    return LayerCosts(times, memory_costs(profile, recomputed).times)


def memory_costs(profile: ModelProfile, recomputed: int) -> LayerCosts:
    """Return the bytes of the layers at the peak of a mini-batch, in the place of times.

    At the end of forward each layer holds its static bytes and the tensors that it has saved for
    all micro-batches that are not recomputed; of those that are, it saves the tensors of one at a
    time. A stage keeps its inputs from other stages for all micro-batches; where a layer saves
    them, they are in memory once.
    """
    rows = profile.rows
    alive = max(profile.chunks - recomputed, min(1, recomputed))
    sizes = [layer.held_bytes + alive * layer.saved.at(rows) for layer in profile.layers]
    carried = [
        Transfer(value.maker, value.user, max(0.0, kept), sent=False)
        for value in profile.carried
        if (kept := profile.chunks * value.size.at(rows) - alive * value.saved.at(rows))
    ]
    return LayerCosts(sizes, transfers=carried)
