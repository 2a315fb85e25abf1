"""Checkpoints of which each process has a part, gathered in the first process.

Each process has all keys and all parameters, those of other processes on the meta device. The first
one asks for the values that it does not have. They are sent one after another: it never has more
than a whole checkpoint and the part of one other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_gpipe.core.data import map_tensors, whole_of
from lightning_gpipe.distributed.group import Group

T = TypeVar("T")


def whole_state(
    module: nn.Module, group: Group, elsewhere: Collection[str], kept: Collection[str] | None
) -> dict[str, Any]:
    """Return a module's state dict with the values of all processes; empty in all but the first.

    Args:
        group: The processes of a pipeline, or of all replicas if these have divided parameters.
        elsewhere: The paths of the modules in stages of other processes.
        kept: The names of the values that this process alone keeps, if it is not in the first
            replica, which has all that is not divided.
    """
    parts = group.gather(own_state(module, group, elsewhere, kept, whole=True))
    state: dict[str, Any] = module.state_dict() if parts else {}
    for part in parts:
        state.update(part)
    return state


def own_state(
    module: nn.Module,
    group: Group,
    elsewhere: Collection[str],
    kept: Collection[str] | None,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """Return this process's part of a state dict; with ``whole``, shards of a stage are joined."""
    state: dict[str, Any] = module.state_dict()
    if whole:
        state = without_shards(state)
    missing, part = _parts(state, group, elsewhere)
    if kept is not None:
        part = {name: part[name] for name in part if name in kept}
    names = set(chain(*group.gather(list(part))))
    if group.rank:
        return part
    _check_complete(missing, names)
    lacking = set(missing)
    return {name: value for name, value in state.items() if name not in lacking}


def whole_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], group: Group, place: int
) -> dict[str, Any]:
    """Return an optimizer's state dict with the states of all; empty but in the first."""
    own = without_shards(state["state"])
    parts = group.gather({k: own[k] for k in own_optimizer_keys(optimizer, own, group, place)})
    if not parts:
        return {}
    whole = {k: value for part in parts for k, value in part.items()}
    return {**state, "state": {k: whole[k] for k in sorted(whole, key=_order)}}


def own_optimizer_keys(
    optimizer: Optimizer, own: Mapping[Any, Any], group: Group, place: int
) -> list[Any]:
    """Return the keys of an optimizer's ``own`` state that this process of ``group`` saves."""
    parameters = [each for one in optimizer.param_groups for each in one["params"]]
    missing = group.broadcast([k for k, each in enumerate(parameters) if each.is_meta])
    filled = [key for key, state in own.items() if state != {}]  # a read leaves an empty one
    first = [key for key in filled if key not in missing] if place == 0 else []
    return first + [k for k in missing if k in filled and not parameters[k].is_meta]


def without_shards(values: T) -> T:
    """Return values with whole tensors for DTensors; all processes of a stage call this."""
    found: T = map_tensors(_whole, values)
    return found


def _whole(tensor: Tensor) -> Tensor:
    divided = isinstance(tensor, DTensor) and not tensor.is_meta
    return whole_of(tensor).cpu() if divided else tensor


def _parts(
    state: Mapping[str, Any], group: Group, elsewhere: Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names whose values the first process lacks, and the values that this one has."""

    def is_missing(name: str) -> bool:
        if isinstance(state[name], Tensor):
            return bool(state[name].is_meta)
        return name.rpartition(".")[0] in elsewhere  # an entry of a module that is no tensor

    missing: list[str] = group.broadcast(list(filter(is_missing, state)))
    return missing, {name: state[name] for name in missing if not is_missing(name)}


def _check_complete(missing: Collection[str], values: Collection[str]) -> None:
    for name in missing:
        if name not in values:
            raise RuntimeError(
                "the values of each parameter and buffer must be in some process: got none for "
                f"{name!r}. Load them from a checkpoint, or build the model on the CPU."
            )


def _order(key: Any) -> tuple[bool, Any]:
    return (False, key) if isinstance(key, int) else (True, str(key))
