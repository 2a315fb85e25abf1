"""Checkpoints of which each process has a part, gathered in the first one.

Each process has all keys and all parameters, those of others on the meta device. So the first one
asks for what it has no values of, and each of the others sends what it has of that, one after
another: the first process never has more than a whole checkpoint and the part of one other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.checkpoint_io import load_state
from lightning_gpipe.processes.group import Group


def whole_state(module: nn.Module, group: Group) -> dict[str, Any]:
    """The state dict of a module with the values of all processes; empty in all but the first."""
    state: dict[str, Any] = module.state_dict()
    missing = group.broadcast([name for name, value in state.items() if _is_missing(value)])
    has = {name: state[name] for name in missing if not _is_missing(state[name])}
    found = _gathered(has, group)
    if group.rank:
        return {}
    for name in missing:
        if name not in found:
            raise RuntimeError(
                "the values of each parameter and buffer must be in some process: got none for "
                f"{name!r}. Load them from a checkpoint, or build the model on the CPU."
            )
        state[name] = found[name]
    return state


def whole_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], group: Group
) -> dict[str, Any]:
    """The state of an optimizer with that of all processes; empty in all but the first.

    Args:
        optimizer: The optimizer.
        state: What of its state this process has.
        group: The processes.
    """
    parameters = [each for one in optimizer.param_groups for each in one["params"]]
    missing = group.broadcast([k for k, each in enumerate(parameters) if each.is_meta])
    own = state["state"]
    found = _gathered({k: own[k] for k in missing if k in own and not parameters[k].is_meta}, group)
    if group.rank:
        return {}
    whole = {k: own[k] for k in own if k not in set(missing)} | found
    in_order = {k: whole[k] for k in sorted(whole, key=_place)}
    return {**state, "state": in_order}


def fetch(module: nn.Module, group: Group) -> None:
    """Give the module of the first process the values of all."""
    state = whole_state(module, group)
    if group.rank == 0:
        load_state(module, state, strict=True)


def _gathered(has: dict[Any, Any], group: Group) -> dict[Any, Any]:
    """What the others have, in the first process."""
    if group.rank:
        group.send(has, 0)
        return {}
    found: dict[Any, Any] = {}
    for rank in range(1, group.size):
        found |= group.receive(rank)
    return found


def _is_missing(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _place(key: Any) -> tuple[bool, Any]:
    """Numbers of parameters first; what an optimizer keeps under other names after them."""
    return (False, key) if isinstance(key, int) else (True, str(key))
