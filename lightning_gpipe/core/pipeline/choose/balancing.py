"""Cuts piped modules by numbers of units, by names, or by the costs of their units.

A balance by cost, which is the number of parameters or is measured, has a stage for each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

from lightning_gpipe.core.balance import (
    LayerCosts,
    Place,
    memory_costs,
    parameter_costs,
    recomputing,
    solve_on,
    time_costs,
)
from lightning_gpipe.core.layout import Around, check_balance, check_enough_layers, outside_stage
from lightning_gpipe.core.pipeline.choose.measuring import LayerMeasurement
from lightning_gpipe.core.pipeline.piped_module import PipedModule
from lightning_gpipe.core.schedules import ActivationCheckpointing

# Numbers of units, the names of where stages begin, or what to go by.
Balance = Sequence[int] | Sequence[str] | str

CRITERIA = ("parameters", "time", "memory")


def balance_of_each(paths: Any, balance: Any) -> list[Any]:
    """Return the balance of each path of a list, or of a single path; a string is for all."""
    if not isinstance(paths, list | tuple):
        if not isinstance(balance, Sequence):
            check_balance(balance)
        return [balance]
    if isinstance(balance, str) and paths:
        return [balance] * len(paths)
    balances = list(balance) if isinstance(balance, list | tuple) else [balance]
    complete = all(isinstance(each, list | tuple) or is_criterion(each) for each in balances)
    if len(balances) != len(paths) or not complete:
        kind = "list" if isinstance(balance, list | tuple) else type(balance).__name__
        names = [path.path if isinstance(path, PipedModule) else path for path in paths]
        raise ValueError(
            f"balance must have a list for each path in module: got a {kind} of {len(balances)}, "
            f"balance={balance!r}, for the {len(paths)} paths {names}. Write "
            "balance=[[2, 2], [3, 1]], or balance='parameters' for all."
        )
    return balances


def is_criterion(balance: Any) -> bool:
    """Return True for a criterion, by which the numbers of units are found."""
    return isinstance(balance, str) and balance in CRITERIA


def balances_for(
    measuring: LayerMeasurement, balances: Sequence[Any], around: Around
) -> list[Sequence[int]]:
    """Return the number of units in each stage, for each module that is measured.

    A criterion counts what is on the devices already: the rest of the model, and the stages of the
    modules before by the same criterion.
    """
    devices = len(measuring.devices)
    places: dict[str, list[Place]] = {}  # the place of each stage, by criterion
    sizes: list[Sequence[int]] = []
    for k, (piped, balance) in enumerate(zip(measuring.modules, balances, strict=True)):
        if not is_criterion(balance):
            sizes.append(_in_units(piped, balance))
            continue
        if not devices:
            raise ValueError(
                f"balance={balance!r} gives each device a stage, so devices must be given: got "
                "devices=None. Write devices=['cuda:0', 'cuda:1'], or a list of numbers."
            )
        check_enough_layers(len(piped.frontend.units), devices, piped.name)
        if balance not in places:
            places[balance] = _places(balance, measuring, outside_stage(around, devices))
        mode = measuring.activation_checkpointing
        if isinstance(mode, list | tuple) and len(mode) > devices:  # of all stages of a chain
            first = sum(map(len, sizes))
            mode = mode[first : first + devices]
        costs, own = _unit_costs(balance, measuring, k, places[balance], mode)
        sizes.append(solve_on(costs, own))
        if balance != "time":  # pipelines of a model run one after another, but are there at once
            pairs = zip(places[balance], costs.of_stages(sizes[-1], own), strict=True)
            places[balance] = [replace(place, busy=place.busy + cost) for place, cost in pairs]
    return sizes


def _unit_costs(
    criterion: str,
    measuring: LayerMeasurement,
    k: int,
    places: Sequence[Place],
    mode: ActivationCheckpointing,
) -> tuple[LayerCosts, Sequence[Place]]:
    if criterion == "parameters":
        return LayerCosts(parameter_costs(measuring.modules[k].frontend.unit_modules)), places
    profile = measuring.profiles[k].with_states(measuring.states)
    places = recomputing(places, profile, mode)
    if criterion == "time":
        return time_costs(profile, split=measuring.split), places
    saving = [replace(place, extra=place.alive) for place in places]
    return memory_costs(profile, min(place.alive for place in places)), saving


def _places(criterion: str, measuring: LayerMeasurement, outside: int) -> list[Place]:
    n = len(measuring.devices)
    if criterion == "parameters":
        places = [Place()] * n
        places[outside] = Place(busy=parameters_around(measuring.modules))
        return places
    speeds = measuring.speeds() if criterion == "time" else [1.0] * n
    places = list(map(Place, speeds, measuring.memory or [inf] * n))
    held = measuring.profiles[0].with_states(measuring.states).around.held_bytes
    busy = held if criterion == "memory" else 0.0
    places[outside] = replace(places[outside], busy=busy, taken=held)
    return places


def _in_units(piped: PipedModule, balance: Any) -> Sequence[int]:
    if isinstance(balance, list | tuple) and balance and all(isinstance(b, str) for b in balance):
        return counts_between(balance, piped.frontend.units, piped.name, piped.path)
    return piped.frontend.in_units(balance)  # of any type: the front-end that cuts by it checks it


def counts_between(starts: Sequence[str], units: Sequence[str], name: str, path: str) -> list[int]:
    """Return the number of units in each stage, by the names of the modules where stages begin.

    >>> counts_between(["down.1", "up"], ["down.0", "down.1.conv", "down.1.norm", "up"])
    [1, 2, 1]

    The first stage begins at the first unit, named or not. A name, relative to the whole model or
    to the pipelined module, stands for the first unit in it. ``name`` and ``path`` are those of the
    pipelined module, for errors.
    """
    indices = [_first(start, units, name, path) for start in starts]
    if any(one >= other for one, other in pairwise(indices)):
        raise ValueError(
            f"balance must name the modules where stages begin in their order: got "
            f"{list(starts)}, which are numbers {indices} of the {len(units)} units of {name}."
        )
    bounds = dict.fromkeys([0, *indices, len(units)])
    return [end - begin for begin, end in pairwise(bounds)]


def _first(start: str, units: Sequence[str], name: str, path: str) -> int:
    for k, unit in enumerate(units):
        if f"{unit}.".startswith((f"{start}.", f"{path}.{start}.")):
            return k
    listed = ", ".join(map(repr, dict.fromkeys(units)))
    raise ValueError(
        f"balance must name modules where stages begin: got {start!r}, and no unit of {name} is "
        f"that or is within it. The units are {listed}."
    )


def parameters_around(modules: Sequence[PipedModule]) -> int:
    """Return the number of parameters of a model that are in no unit of its piped modules."""
    units = (sum(parameter_costs(piped.frontend.unit_modules)) for piped in modules)
    return max(0, sum(parameter_costs([modules[0].root])) - sum(units))
