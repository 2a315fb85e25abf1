"""Checkpoints of which each process has a part, gathered in the first one.

Each process has all keys and all parameters, those of others on the meta device. So the first one
asks for what it has no values of, and each of the others sends what it has of that, one after
another: the first process never has more than a whole checkpoint and the part of one other.

Where each process saves its part itself, that is the same part, and only the names are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.checkpoint_io import load_state
from lightning_gpipe.processes.group import Group


def whole_state(module: nn.Module, group: Group, elsewhere: Collection[str]) -> dict[str, Any]:
    """The state dict of a module with the values of all processes; empty in all but the first.

    Args:
        module: The module.
        group: The processes.
        elsewhere: The paths of the modules in stages of other processes.
    """
    state: dict[str, Any] = module.state_dict()
    missing, has = _parted(state, group, elsewhere)
    found = _gathered(has, group)
    if group.rank:
        return {}
    _check_found(missing, found)
    for name in missing:
        state[name] = found[name]
    return state


def own_state(module: nn.Module, group: Group, elsewhere: Collection[str]) -> dict[str, Any]:
    """The part of a module's state dict that this process saves; as in :func:`whole_state`."""
    state: dict[str, Any] = module.state_dict()
    missing, has = _parted(state, group, elsewhere)
    found = _gathered(dict.fromkeys(has), group)
    if group.rank:
        return has
    _check_found(missing, found)
    return {name: value for name, value in state.items() if name not in set(missing)}


def own_optimizer_keys(optimizer: Optimizer, own: Mapping[Any, Any], group: Group) -> list[Any]:
    """The keys of the part of an optimizer's state that this process saves.

    Args:
        optimizer: The optimizer.
        own: What of its state this process has.
        group: The processes.
    """
    missing, has = _parted_optimizer(optimizer, own, group)
    return list(has) if group.rank else [key for key in own if key not in missing]


def whole_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], group: Group
) -> dict[str, Any]:
    """The state of an optimizer with that of all processes; empty in all but the first.

    Args:
        optimizer: The optimizer.
        state: What of its state this process has.
        group: The processes.
    """
    own = state["state"]
    missing, has = _parted_optimizer(optimizer, own, group)
    found = _gathered(has, group)
    if group.rank:
        return {}
    whole = {k: own[k] for k in own if k not in missing} | found
    in_order = {k: whole[k] for k in sorted(whole, key=_place)}
    return {**state, "state": in_order}


def fetch(module: nn.Module, group: Group, elsewhere: Collection[str]) -> None:
    """Give the module of the first process the values of all; as in :func:`whole_state`."""
    state = whole_state(module, group, elsewhere)
    if group.rank == 0:
        load_state(module, state, strict=True)


def _parted(
    state: Mapping[str, Any], group: Group, elsewhere: Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """The names that the first process has no values of, and what this one has of them."""

    def is_missing(name: str) -> bool:
        if isinstance(state[name], Tensor):
            return bool(state[name].is_meta)
        return name.rpartition(".")[0] in elsewhere  # what a module keeps that is no tensor

    missing: list[str] = group.broadcast(list(filter(is_missing, state)))
    return missing, {name: state[name] for name in missing if not is_missing(name)}


def _parted_optimizer(
    optimizer: Optimizer, own: Mapping[Any, Any], group: Group
) -> tuple[set[int], dict[int, Any]]:
    """The numbers of parameters that the first process has not, and what this one has of them."""
    parameters = [each for one in optimizer.param_groups for each in one["params"]]
    missing = group.broadcast([k for k, each in enumerate(parameters) if each.is_meta])
    return set(missing), {k: own[k] for k in missing if k in own and not parameters[k].is_meta}


def _check_found(missing: Collection[str], found: Collection[str]) -> None:
    for name in missing:
        if name not in found:
            raise RuntimeError(
                "the values of each parameter and buffer must be in some process: got none for "
                f"{name!r}. Load them from a checkpoint, or build the model on the CPU."
            )


def _gathered(has: dict[Any, Any], group: Group) -> dict[Any, Any]:
    """What the others have, in the first process."""
    if group.rank:
        group.send(has, 0)
        return {}
    found: dict[Any, Any] = {}
    for rank in range(1, group.size):
        found |= group.receive(rank)
    return found


def _place(key: Any) -> tuple[bool, Any]:
    """Numbers of parameters first; what an optimizer keeps under other names after them."""
    return (False, key) if isinstance(key, int) else (True, str(key))
