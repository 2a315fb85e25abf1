"""Checkpoints that do not depend on the pipeline that saved them, with all tensors on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_gpipe.core.data import from_whole, identity, map_tensors
from lightning_gpipe.core.frontends import become, replaceable


def on_cpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with all tensors on the CPU; tied tensors stay tied."""
    copies: dict[Hashable, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        key = identity(tensor)  # tied weights appear under each of their names
        if key not in copies:
            copies[key] = tensor.cpu()
        return copies[key]

    moved: dict[str, Any] = map_tensors(copy, checkpoint)
    metadata = getattr(checkpoint.get("state_dict"), "_metadata", None)
    if metadata is not None:
        moved["state_dict"]._metadata = metadata
    return moved


def to_cpu(module: nn.Module) -> None:
    """Move all but meta tensors, and shards that a graph keeps in place, to the CPU."""
    parameters = list(module.parameters())
    if all(x.is_meta or x.device.type == "cpu" for x in chain(parameters, module.buffers())):
        return  # PyTorch would swap shards with themselves
    held = any(isinstance(x, DTensor) for x in parameters)
    with suppress(RuntimeError) if held else nullcontext():
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())


def load_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a state dict; meta tensors, which stay the same objects, get the memory of its own."""
    state = divided_as_in(module, state)
    taken = set[Hashable]()
    with replaceable(*module.modules()):
        for name, own in module.state_dict(keep_vars=True).items():
            value = state.get(name)
            if not (isinstance(own, Tensor) and own.is_meta and isinstance(value, Tensor)):
                continue
            value = value.detach().to(own.dtype)
            if value.is_meta or value.shape != own.shape:
                continue
            key = identity(value)  # that of several tensors, which are tied elsewhere
            value = value.clone() if key in taken else value
            taken.add(key)
            is_parameter = isinstance(own, nn.Parameter)
            become(own, nn.Parameter(value, own.requires_grad) if is_parameter else value)
    module.load_state_dict(state, strict=strict)


def load_into_stages(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a state dict into a module some of whose parameters are in other processes, on meta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")  # for meta parameters
        module.load_state_dict(divided_as_in(module, state), strict=strict)


def divided_as_in(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with shards of the tensors of which a module has shards."""
    own = {name: x for name, x in module.state_dict().items() if isinstance(x, DTensor)}
    shards = {name: from_whole(state[name], x) for name, x in own.items() if name in state}
    return {**state, **shards} if shards else state


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict, with shards of the states of parameters that are shards."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    divided = {k: x for k, x in enumerate(parameters) if isinstance(x, DTensor)}
    states = dict(state["state"])
    for key in states:
        if (like := divided.get(int(key) if str(key).isdecimal() else key)) is not None:
            states[key] = map_tensors(partial(from_whole, like=like), states[key])
    optimizer.load_state_dict({**state, "state": states})


@contextmanager
def state_follows(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let parameters move in a ``with`` block; state on their devices follows at its end."""
    # Optimizer.load_state_dict would move the state too, but it casts tensors to the dtype of the
    # parameter and replaces the parameter groups.
    optimizers = list(optimizers)
    before = [
        (optimizer, parameter, parameter.device)
        for optimizer in optimizers
        for parameter in optimizer.state
        if isinstance(parameter, Tensor)  # some optimizers have common state under a string
    ]
    try:
        yield
    finally:
        for optimizer, parameter, device in before:
            if parameter.device != device:
                move = partial(_moved, source=device, target=parameter.device)
                optimizer.state[parameter] = map_tensors(move, optimizer.state[parameter])


def _moved(tensor: Tensor, source: torch.device, target: torch.device) -> Tensor:
    is_step = tensor.dim() == 0 and source.type == "cpu"  # a count that is read on the host
    return tensor if is_step or tensor.device != source else tensor.to(target)


def follow_parameters(optimizer: Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters, those on meta left out.

    A learning rate that is a tensor goes to the CPU if the parameters are on several devices.
    """
    drop_foreign_states(optimizer)
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor) and len({x.device for x in group["params"]}) > 1:
            rate.data = rate.cpu()


def drop_foreign_states(optimizer: Optimizer) -> None:
    """Drop the states of meta parameters, whose values are in another process."""
    for parameter in list(optimizer.state):
        if isinstance(parameter, Tensor) and parameter.is_meta:
            del optimizer.state[parameter]
