"""Keeps the state of optimizers on the devices of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.core.data import map_tensors


@contextmanager
def state_follows(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let parameters move to other devices in a ``with`` block; their state follows at its end.

    State on other devices than the parameter's, such as a count of steps on the CPU, stays there.
    """
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
    """Move the state of an optimizer to the devices of its parameters.

    A learning rate that is a tensor goes to the CPU if the parameters are on several devices.
    """
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
