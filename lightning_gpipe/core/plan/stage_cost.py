"""What the stages of a balance cost for a micro-batch, by what their layers cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from lightning_gpipe.core.plan.measured import LayerProfile, ModelProfile


class StageCost(NamedTuple):
    """What a run of layers costs for a micro-batch, on a device of speed 1.

    Attributes:
        forward, dropping: As of a layer.
        backward: The time of a backward; where it is split, of its first part.
        weights: The time of the second part of a backward that is split, or else 0.
        saved: The bytes that are saved for a backward, its inputs from other stages not included.
        left: The bytes that are kept from the first part of a backward to the second, or else 0.
        entering: The bytes of its inputs from other stages.
        leaving: The bytes that later stages get of it.
    """

    forward: float
    dropping: float
    backward: float
    saved: float
    entering: float = 0.0
    leaving: float = 0.0
    weights: float = 0.0
    left: float = 0.0

    @property
    def time(self) -> float:
        """Forward and backward of a micro-batch that keeps its activations."""
        return self.forward + self.backward + self.weights


def costs_of(
    profile: ModelProfile, balance: Sequence[int], rows: int, *, split: bool = False
) -> list[StageCost]:
    """What each stage of a balance costs.

    A backward is not split where no stage before waits for it: it is computed at once then.

    Args:
        profile: What was measured.
        balance: The number of layers in each stage.
        rows: Those of the micro-batch.
        split: Whether backwards are split.

    Raises:
        ValueError: If they are, and were not measured so.
    """
    if split and not profile.split:
        raise ValueError(
            "backwards that are split must have been measured so: got a profile without. Measure "
            "it with profile(..., split_backward=True)."
        )
    stage_of = [j for j, size in enumerate(balance) for _ in range(size)]
    entering, leaving, twice = ([0.0] * len(balance) for _ in range(3))
    for each in profile.carried:
        maker, user = stage_of[each.maker], stage_of[each.user]
        if maker != user:
            leaving[maker] += each.size.at(rows)
            entering[user] += each.size.at(rows)
            twice[user] += each.saved.at(rows)
    layers, found = iter(profile.layers), []
    for j, size in enumerate(balance):
        own = list(islice(layers, size))
        backward, weights, left = _backward(own, rows, split=split)
        found.append(
            StageCost(
                sum(layer.forward.at(rows) for layer in own),
                sum(layer.dropping.at(rows) for layer in own),
                backward,
                sum(layer.saved.at(rows) for layer in own) - twice[j],
                entering[j],
                leaving[j],
                weights,
                left,
            )
        )
    return found


def parts_of(profile: ModelProfile, balance: Sequence[int]) -> list[tuple[float, float]]:
    """For each stage what both parts of a backward take, relative to a whole one.

    Args:
        profile: What was measured, backwards in two parts too.
        balance: The number of layers in each stage.
    """
    pairs = zip(
        costs_of(profile, balance, profile.rows),
        costs_of(profile, balance, profile.rows, split=True),
        strict=True,
    )
    return [
        (split.backward / whole.backward, split.weights / whole.backward)
        if whole.backward
        else (1.0, 0.0)
        for whole, split in pairs
    ]


def sizes_of(rows: int, chunks: int) -> tuple[int, ...]:
    """The rows of each micro-batch, as even as possible; no more micro-batches than rows."""
    m = min(chunks, rows)
    return tuple(rows // m + (i < rows % m) for i in range(m))


def _backward(
    layers: Sequence[LayerProfile], rows: int, *, split: bool
) -> tuple[float, float, float]:
    """The time of a backward, that of its second part, and the bytes that it leaves for that."""
    if not split or not layers[0].waited:
        return sum(layer.backward.at(rows) for layer in layers), 0.0, 0.0
    return (
        sum(layer.inputs.at(rows) for layer in layers if layer.inputs),
        sum(layer.weights.at(rows) for layer in layers if layer.weights),
        sum(layer.left.at(rows) for layer in layers if layer.left),
    )
