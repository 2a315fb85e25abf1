"""Checkpoints that do not depend on the pipeline from which they were saved.

A checkpoint is loaded before the pipeline is set up, into a plain module on the CPU or the meta
device, and saved from one that is spread over devices. In the file all tensors are on the CPU, so
that a machine with fewer devices can load it.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.core.data import identity, map_tensors
from lightning_gpipe.core.frontends import on_meta


def on_cpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The same checkpoint with all tensors on the CPU; tied tensors stay tied."""
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


def load_state(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a state dict into ``module``, which may be on the meta device.

    Meta tensors cannot be copied into: the loaded tensors replace them, cast to their dtype. What
    was one parameter under several names stays one.
    """
    if not on_meta(module):
        module.load_state_dict(state, strict=strict)
        return
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    cast = {name: value.to(dtypes.get(name, value.dtype)) for name, value in state.items()}
    tied = [slots for slots in _slots(module).values() if len(slots) > 1]
    module.load_state_dict(cast, strict=strict, assign=True)
    for slots in tied:
        values = [parameters[name] for parameters, name in slots]
        loaded = next((value for value in values if not value.is_meta), values[0])
        for parameters, name in slots:
            parameters[name] = loaded


def load_values(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a state dict into a module that is a pipeline, of which a process has a part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")  # what others have
        module.load_state_dict(state, strict=strict)


def _slots(module: nn.Module) -> dict[nn.Parameter, list[tuple[dict[str, Any], str]]]:
    """Where each parameter is: the dict of a module's parameters, and the name in it."""
    found: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((each._parameters, name))
    return found


def follow_parameters(optimizer: Optimizer) -> None:
    """Move what an optimizer has to where it can be used with its parameters.

    The state of one that was used before goes to the devices of the parameters, and a learning rate
    that is a tensor, which is for all of them, to the CPU.
    """
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor) and len({each.device for each in group["params"]}) > 1:
            rate.data = rate.cpu()


def drop_foreign_states(optimizer: Optimizer) -> None:
    """Drop the states of parameters whose values another process has."""
    for parameter in list(optimizer.state):
        if isinstance(parameter, Tensor) and parameter.is_meta:
            del optimizer.state[parameter]


def to_cpu(module: nn.Module) -> None:
    """Move the values that this process has to the CPU."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())
