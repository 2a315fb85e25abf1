"""The costs of the stages of a balance for a micro-batch, by those of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_gpipe.core.balance import LinearCost, ModelProfile
from lightning_gpipe.core.layout import layer_ranges
from lightning_gpipe.core.schedules import ScheduleKind


class MicroBatchCost(NamedTuple):
    """The costs of a stage for a micro-batch, on a device of speed 1."""

    forward: float  # the time, keeping its activations
    dropping: float  # the time of a forward that drops them
    backward: float  # the time; where it is split, of its first part
    saved: float  # bytes for a backward, without its inputs from other stages
    entering: float = 0.0  # bytes of its inputs from other stages
    leaving: float = 0.0  # bytes to later stages
    weights: float = 0.0  # the time of the second part of a split backward
    left: float = 0.0  # bytes from the first part to the second

    @property
    def time(self) -> float:
        """The time of forward and backward of a micro-batch that keeps its activations."""
        return self.forward + self.backward + self.weights


def costs_of(
    profile: ModelProfile, balance: Sequence[int], rows: int, *, split: bool = False
) -> list[MicroBatchCost]:
    """Return the costs of each stage; ``split`` divides backwards for which another stage waits."""
    if split and not profile.split:
        raise ValueError(
            "backwards that are split must have been measured so: got a profile without. Measure "
            "it with profile(..., split_backward=True)."
        )
    ranges = layer_ranges(balance)
    stage_of = [j for j, own in enumerate(ranges) for _ in own]
    entering, leaving, twice = ([0.0] * len(balance) for _ in range(3))
    for value in profile.carried:
        maker, user = stage_of[value.maker], stage_of[value.user]
        if maker != user:
            leaving[maker] += value.size.at(rows)
            entering[user] += value.size.at(rows)
            twice[user] += value.saved.at(rows)
    costs = []
    for j, own in enumerate(ranges):
        layers = profile.layers[own.start : own.stop]
        divided = split and layers[0].waited
        costs.append(
            MicroBatchCost(
                _total(rows, [layer.forward for layer in layers]),
                _total(rows, [layer.dropping for layer in layers]),
                _total(rows, [layer.inputs if divided else layer.backward for layer in layers]),
                _total(rows, [layer.saved for layer in layers]) - twice[j],
                entering[j],
                leaving[j],
                _total(rows, [layer.weights for layer in layers if divided]),
                _total(rows, [layer.left for layer in layers if divided]),
            )
        )
    return costs


def _total(rows: int, costs: Iterable[LinearCost | None]) -> float:
    """Return the sum of the costs of a micro-batch; None was not measured."""
    return sum(cost.at(rows) for cost in costs if cost)


def output_bytes(profile: ModelProfile, sizes: Iterable[int], order: ScheduleKind) -> float:
    """Return the bytes of the outputs of micro-batches of these sizes that are there at once."""
    outputs = map(profile.output.at, sizes)
    return max(outputs) if order.by_micro_batch else sum(outputs)


def sizes_of(rows: int, chunks: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch, as even as possible; no more micro-batches than rows."""
    m = min(chunks, rows)
    return tuple(rows // m + (i < rows % m) for i in range(m))
