"""Cuts piped modules by numbers of units, by names, or by what their units cost.

A balance by cost has a stage for each device. The cost is the number of parameters, which is known
before anything has run, or is measured: time, or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

from lightning_gpipe.core.balance import (
    LayerCosts,
    ModelProfile,
    Place,
    StageCosts,
    counts_between,
    memory_costs,
    solve_on,
    stage_costs,
    time_costs,
)
from lightning_gpipe.core.layout import Around, check_enough_layers
from lightning_gpipe.core.pipeline.choose.measuring import Measuring
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.schedules import ActivationCheckpointing, count_recomputed

# Numbers of units, the names of where stages begin, or what to go by.
Balance = Sequence[int] | Sequence[str] | str


@dataclass(frozen=True)
class Weights:
    """The costs of units, by the criterion of a balance.

    Attributes:
        costs: Returns the costs of the units of a module, by the module's index.
        around: The cost of what is around the modules, on its device.
        lasting: True if the cost remains while another pipeline of the model runs.
        speeds: The relative speed of each device; empty if all are equal.
        memory: The bytes of each device; empty if there is no limit.
        bytes_around: The bytes of what is around the modules.
    """

    costs: Callable[[int], LayerCosts]
    around: float = 0.0
    lasting: bool = True
    speeds: Sequence[float] = ()
    memory: Sequence[float] = ()
    bytes_around: float = 0.0

    def places(self, busy: Sequence[float], outside: int) -> list[Place]:
        """Return the place of each stage, on devices with these costs already."""
        return [
            Place(
                speed=self.speeds[j] if self.speeds else 1.0,
                memory=self.memory[j] if self.memory else inf,
                busy=cost,
                taken=self.bytes_around if j == outside else 0.0,
            )
            for j, cost in enumerate(busy)
        ]


def _by_parameters(modules: Sequence[PipedModule], _: Measuring) -> Weights:
    return Weights(lambda k: LayerCosts(modules[k].frontend.costs()), parameters_around(modules))


def _by_time(_: Sequence[PipedModule], measuring: Measuring) -> Weights:
    """Weigh units by their time for a mini-batch."""
    profiles, mode = measuring.profiles, measuring.activation_checkpointing

    def costs(k: int) -> LayerCosts:
        recomputed = count_recomputed(mode, profiles[k].chunks)
        return time_costs(profiles[k], recomputed, split=measuring.split)

    return Weights(
        costs,
        lasting=False,
        speeds=measuring.speeds(),
        memory=measuring.memory,
        bytes_around=profiles[0].around.held_bytes,
    )


def _by_memory(_: Sequence[PipedModule], measuring: Measuring) -> Weights:
    """Weigh units by their bytes at the peak of a mini-batch."""
    profiles, mode = measuring.profiles, measuring.activation_checkpointing

    def costs(k: int) -> LayerCosts:
        peak = memory_costs(profiles[k], count_recomputed(mode, profiles[k].chunks))
        return LayerCosts(peak.times, peak.times, peak.transfers)

    around = profiles[0].around.held_bytes
    return Weights(costs, around, memory=measuring.memory, bytes_around=around)


_WEIGHTS: dict[str, Callable[[Sequence[PipedModule], Measuring], Weights]] = {
    "parameters": _by_parameters,
    "time": _by_time,
    "memory": _by_memory,
}
FOUND = tuple(_WEIGHTS)


def balance_of_each(paths: Any, balance: Any) -> list[Any]:
    """Return the balance of each path of a list, or of a single path; a string is for all.

    Raises:
        ValueError: If there is not a balance for each.
    """
    if not isinstance(paths, list | tuple):
        return [balance]
    if isinstance(balance, str) and paths:
        return [balance] * len(paths)
    balances = list(balance) if isinstance(balance, list | tuple) else [balance]
    if len(balances) != len(paths) or not all(map(_is_balance, balances)):
        kind = "list" if isinstance(balance, list | tuple) else type(balance).__name__
        raise ValueError(
            f"balance must have a list for each path in module: got a {kind} of {len(balances)}, "
            f"balance={balance!r}, for the {len(paths)} paths {list(map(_path_of, paths))}. Write "
            "balance=[[2, 2], [3, 1]], or balance='parameters' for all."
        )
    return balances


def is_criterion(balance: Any) -> bool:
    """Return whether a balance is a criterion, by which the numbers of units are found."""
    return isinstance(balance, str) and balance in _WEIGHTS


def _is_balance(balance: Any) -> bool:
    return isinstance(balance, list | tuple) or is_criterion(balance)


def _path_of(path: str | PipedModule) -> str:
    return path.path if isinstance(path, PipedModule) else path


def balances_for(
    modules: Sequence[PipedModule],
    balances: Sequence[Any],
    measuring: Measuring,
    around: Around,
) -> list[Sequence[int]]:
    """Return the number of units in each stage, for each piped module.

    A balance is numbers, names of units where stages begin, or a criterion. A criterion counts what
    is on the devices already: what is around the modules, and the stages of the modules before by
    the same criterion.

    Raises:
        TypeError, ValueError: If a balance is none of these, or does not fit.
    """
    devices = len(measuring.devices)
    outside = devices - 1 if around == "last" else 0
    busy: dict[str, list[float]] = {}  # the costs on each device, by criterion
    weights: dict[str, Weights] = {}
    sizes = []
    for k, (piped, balance) in enumerate(zip(modules, balances, strict=True)):
        if not is_criterion(balance):
            sizes.append(_in_units(piped, balance))
            continue
        if not devices:
            raise ValueError(
                f"balance={balance!r} gives each device a stage, so devices must be given: got "
                "devices=None. Write devices=['cuda:0', 'cuda:1'], or a list of numbers."
            )
        check_enough_layers(len(piped.frontend.units), devices, piped.name)
        if balance not in weights:
            weights[balance] = _WEIGHTS[balance](modules, measuring)
            busy[balance] = [0.0] * devices
            busy[balance][outside] = weights[balance].around
        weight = weights[balance]
        costs = weight.costs(k)
        sizes.append(solve_on(costs, weight.places(busy[balance], outside)))
        if weight.lasting:
            unit_costs = iter(costs.times)
            pairs = zip(busy[balance], sizes[-1], strict=True)
            busy[balance] = [cost + sum(islice(unit_costs, size)) for cost, size in pairs]
    return sizes


def measured_costs(
    profiles: Sequence[ModelProfile],
    balances: Sequence[Sequence[int]],
    mode: ActivationCheckpointing,
    around: Around,
) -> list[StageCosts]:
    """Return what a mini-batch costs each stage, if its units were measured, else nothing."""
    costs = []
    for profile, balance in zip(profiles, balances, strict=False):
        recomputed = count_recomputed(mode, profile.chunks)
        outside = len(balance) - 1 if around == "last" else 0
        costs += stage_costs(profile, balance, recomputed, outside)
    return costs


def _in_units(piped: PipedModule, balance: Any) -> Sequence[int]:
    """Return the number of units in each stage, by numbers or names."""
    if isinstance(balance, list | tuple) and balance and all(isinstance(b, str) for b in balance):
        return counts_between(balance, piped.frontend.units, piped.name, piped.path)
    return piped.frontend.in_units(balance)  # of any type: the front-end that cuts by it checks it


def parameters_around(modules: Sequence[PipedModule]) -> int:
    """Return the number of parameters of a model that are in no unit of its piped modules."""
    total = sum(parameter.numel() for parameter in modules[0].root.parameters())
    return max(0, total - sum(sum(piped.frontend.costs()) for piped in modules))
