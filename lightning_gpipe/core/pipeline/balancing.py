"""How what runs as a pipeline is cut: by numbers, by names, or by what its units cost.

A balance that is found has a stage for each device. It goes by the number of parameters, which is
known before anything has run, or by what was measured: time, or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

from lightning_gpipe.core.pipeline.measuring import Measuring
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    Around,
    LayerCosts,
    ModelProfile,
    Place,
    StageCosts,
    check_enough_layers,
    count_recomputed,
    counts_between,
    memory_costs,
    solve_on,
    stage_costs,
    time_costs,
)

# Numbers of units, the names of where stages begin, or what to go by.
Balance = Sequence[int] | Sequence[str] | str


@dataclass(frozen=True)
class Weights:
    """What units cost, by the measure that a balance goes by.

    Attributes:
        costs: The costs of the units of one of those that were taken, by its index.
        around: What the device of what is around them has already, in the same unit.
        lasting: Whether a stage needs it also while another pipeline of the model runs.
        speeds: How many times as fast each device is; empty if that does not matter.
        memory: The bytes of each device; empty if that does not matter.
        taken: The bytes that what is around needs there.
    """

    costs: Callable[[int], LayerCosts]
    around: float = 0.0
    lasting: bool = True
    speeds: Sequence[float] = ()
    memory: Sequence[float] = ()
    taken: float = 0.0

    def places(self, held: Sequence[float], outside: int) -> list[Place]:
        """What each stage runs on.

        Args:
            held: What the device of each has already.
            outside: The index of the one that has what is around.
        """
        n = len(held)
        return [
            Place(
                speed=self.speeds[j] if self.speeds else 1.0,
                memory=self.memory[j] if self.memory else inf,
                busy=held[j],
                taken=self.taken if j == outside % n else 0.0,
            )
            for j in range(n)
        ]


def _by_parameters(found: Sequence[Taken], _: Measuring) -> Weights:
    """The numbers of parameters."""
    return Weights(lambda k: LayerCosts(found[k].costs()), parameters_around(found))


def _by_time(_: Sequence[Taken], measuring: Measuring) -> Weights:
    """The times for a mini-batch."""
    profiles, mode = measuring.profiles, measuring.activation_checkpointing

    def costs(k: int) -> LayerCosts:
        recomputed = count_recomputed(mode, profiles[k].chunks)
        return time_costs(profiles[k], recomputed, split=measuring.split)

    return Weights(
        costs,
        lasting=False,
        speeds=measuring.speeds(),
        memory=measuring.memory,
        taken=profiles[0].around.held_bytes,
    )


def _by_memory(_: Sequence[Taken], measuring: Measuring) -> Weights:
    """The bytes at the peak of a mini-batch."""
    profiles, mode = measuring.profiles, measuring.activation_checkpointing

    def costs(k: int) -> LayerCosts:
        found = memory_costs(profiles[k], count_recomputed(mode, profiles[k].chunks))
        return LayerCosts(found.times, found.times, found.transfers)

    around = profiles[0].around.held_bytes
    return Weights(costs, around, memory=measuring.memory, taken=around)


_BY: dict[str, Callable[[Sequence[Taken], Measuring], Weights]] = {
    "parameters": _by_parameters,
    "time": _by_time,
    "memory": _by_memory,
}
FOUND = tuple(_BY)


def balance_of_each(paths: Any, balance: Any) -> list[Any]:
    """The balance of each path of a list, or that of a single path; a string is for all.

    Raises:
        ValueError: If there is not a balance for each.
    """
    if not isinstance(paths, list | tuple):
        return [balance]
    if isinstance(balance, str) and paths:
        return [balance] * len(paths)
    given = list(balance) if isinstance(balance, list | tuple) else [balance]
    if len(given) != len(paths) or not all(map(_is_balance, given)):
        what = "list" if isinstance(balance, list | tuple) else type(balance).__name__
        raise ValueError(
            f"balance must have a list for each path in module: got a {what} of {len(given)}, "
            f"balance={balance!r}, for the {len(paths)} paths {list(map(_path_of, paths))}. Write "
            "balance=[[2, 2], [3, 1]], or balance='parameters' for all."
        )
    return given


def is_found(balance: Any) -> bool:
    """Whether a balance is what to go by."""
    return isinstance(balance, str) and balance in _BY


def _is_balance(balance: Any) -> bool:
    return isinstance(balance, list | tuple) or is_found(balance)


def _path_of(path: str | Taken) -> str:
    return path.path if isinstance(path, Taken) else path


def balances_for(
    found: Sequence[Taken],
    balances: Sequence[Any],
    measuring: Measuring,
    around: Around,
) -> list[Sequence[int]]:
    """The number of units in each stage, of each of what was taken.

    Args:
        found: What is cut.
        balances: As the user gave them: numbers, names of units where stages begin, or what to go
            by, which counts what is on the devices already: what is around, and the stages of
            those that were cut by it before.
        measuring: Measures units, if a balance goes by that; knows the devices.
        around: Which stage what is around is with.

    Raises:
        TypeError, ValueError: If a balance is none of these, or does not fit.
    """
    devices = len(measuring.devices)
    outside = -1 if around == "last" else 0
    held: dict[str, list[float]] = {}
    weights: dict[str, Weights] = {}
    sizes = []
    for k, (taken, balance) in enumerate(zip(found, balances, strict=True)):
        if not is_found(balance):
            sizes.append(_given(taken, balance))
            continue
        if not devices:
            raise ValueError(
                f"balance={balance!r} gives each device a stage, so devices must be given: got "
                "devices=None. Write devices=['cuda:0', 'cuda:1'], or a list of numbers."
            )
        check_enough_layers(len(taken.units), devices, taken.name)
        if balance not in weights:
            weights[balance] = _BY[balance](found, measuring)
            held[balance] = [0.0] * devices
            held[balance][outside] = weights[balance].around
        weight = weights[balance]
        costs = weight.costs(k)
        sizes.append(solve_on(costs, weight.places(held[balance], outside % devices)))
        if weight.lasting:
            each = iter(costs.times)
            pairs = zip(held[balance], sizes[-1], strict=True)
            held[balance] = [h + sum(islice(each, size)) for h, size in pairs]
    return sizes


def measured_costs(
    profiles: Sequence[ModelProfile],
    balances: Sequence[Sequence[int]],
    mode: ActivationCheckpointing,
    around: Around,
) -> list[StageCosts]:
    """What a mini-batch costs each stage, by what was measured of its units; nothing if none was.

    Args:
        profiles: What the units of each module cost.
        balances: The number of units in each stage, of each.
        mode: Which micro-batches are recomputed.
        around: Which stage what is around is with.
    """
    found = []
    for profile, balance in zip(profiles, balances, strict=False):
        recomputed = count_recomputed(mode, profile.chunks)
        outside = len(balance) - 1 if around == "last" else 0
        found += stage_costs(profile, balance, recomputed, outside)
    return found


def _given(taken: Taken, balance: Any) -> Sequence[int]:
    """The number of units in each stage, by numbers or names."""
    if isinstance(balance, list | tuple) and balance and all(isinstance(b, str) for b in balance):
        return counts_between(balance, taken.units, taken.name, taken.path)
    chosen: Sequence[int] = balance
    return chosen  # whatever it is: who cuts by it says what is wrong with it


def parameters_around(found: Sequence[Taken]) -> int:
    """The number of parameters of a model that are in no unit of what was taken of it."""
    total = sum(parameter.numel() for parameter in found[0].root.parameters())
    return max(0, total - sum(sum(taken.costs()) for taken in found))
