"""The costs of layers that were measured, for the solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lightning_gpipe.core.plan.balance.costs import LayerCosts, Transfer
from lightning_gpipe.core.plan.measured import ModelProfile


@dataclass(frozen=True)
class StageCosts:
    """What a stage costs in a mini-batch.

    Attributes:
        time: Forward, recomputation and backward of all micro-batches, in ``unit``.
        memory: The bytes at its peak.
        unit: ``"s"`` or ``"FLOP"``.
    """

    time: float
    memory: float
    unit: Literal["s", "FLOP"]

    @property
    def columns(self) -> tuple[str, str]:
        """What the two are called in a table."""
        return ("ms", "MiB") if self.unit == "s" else ("GFLOP", "MiB")

    @property
    def cells(self) -> tuple[str, str]:
        """Both, in the units of :attr:`columns`."""
        time = self.time * 1e3 if self.unit == "s" else self.time / 1e9
        return f"{time:,.2f}", f"{self.memory / 2**20:,.1f}"


def stage_costs(
    profile: ModelProfile, balance: Sequence[int], recomputed: int, outside: int
) -> list[StageCosts]:
    """What each stage of a balance costs, by the costs of its layers.

    Args:
        profile: What was measured.
        balance: The number of layers in each stage.
        recomputed: How many of the micro-batches are recomputed.
        outside: The stage with what is around.
    """
    times = time_costs(profile, recomputed).times
    memory = memory_costs(profile, recomputed)
    found = []
    for j, (end, size) in enumerate(zip(accumulate(balance), balance, strict=True)):
        own = range(end - size, end)
        held = sum(memory.times[k] for k in own)
        held += sum(t.time for t in memory.transfers if t.user in own and t.maker not in own)
        held += profile.around.held_bytes if j == outside else 0
        time = profile.chunks * sum(times[k] for k in own)
        found.append(StageCosts(time, held, profile.unit))
    return found


def time_costs(profile: ModelProfile, recomputed: int, *, split: bool = False) -> LayerCosts:
    """What counts for the speed of a pipeline, with what a stage must hold as its memory.

    What is around the layers does not count: it runs before and after them, while all stages wait.

    Args:
        profile: What was measured.
        recomputed: How many of the micro-batches are recomputed.
        split: Whether backwards are in two parts.
    """
    times = profile.times(recomputed=recomputed / profile.chunks, split=split)
    return LayerCosts(times, memory_costs(profile, recomputed).times)


def memory_costs(profile: ModelProfile, recomputed: int) -> LayerCosts:
    """The bytes of layers at the peak of a mini-batch, in the place of times.

    Each layer has what it holds anyway, and what it has saved for the micro-batches that are not
    recomputed: all at the end of forward, when none has had its backward. Of those that are, it has
    what one of them saves. A stage keeps its inputs from other stages of all micro-batches; what
    a layer saves of them is in memory once.

    Args:
        profile: What was measured.
        recomputed: How many of the micro-batches are recomputed.
    """
    rows = profile.rows
    alive = max(profile.chunks - recomputed, min(1, recomputed))
    sizes = [layer.held_bytes + alive * layer.saved.at(rows) for layer in profile.layers]
    carried = [
        Transfer(each.maker, each.user, max(0.0, kept), sent=False)
        for each in profile.carried
        if (kept := profile.chunks * each.size.at(rows) - alive * each.saved.at(rows))
    ]
    return LayerCosts(sizes, transfers=carried)
