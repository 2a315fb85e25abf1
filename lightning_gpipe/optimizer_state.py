"""The state that optimizers keep for parameters that move to another device.

``Optimizer.load_state_dict`` would put it there too, but it casts tensors to the dtype of the
parameter and replaces the parameter groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gpipe.core.data import map_tensors


@contextmanager
def state_follows(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """A ``with`` block in which parameters may move to other devices; their state does at its end.

    What is elsewhere, such as a count of steps on the CPU, stays there.
    """
    optimizers = list(optimizers)
    before = [
        (optimizer, parameter, parameter.device)
        for optimizer in optimizers
        for parameter in optimizer.state
        if isinstance(parameter, Tensor)  # some keep what is for all under a string
    ]
    try:
        yield
    finally:
        for optimizer, parameter, device in before:
            if parameter.device != device:
                optimizer.state[parameter] = _moved(
                    optimizer.state[parameter], device, parameter.device
                )


def _moved(state: dict[str, object], source: torch.device, target: torch.device) -> object:
    """The state of a parameter, moved from its device to another one."""

    def move(tensor: Tensor) -> Tensor:
        counts = tensor.dim() == 0 and source.type == "cpu"  # steps, which are read on the host
        return tensor if counts or tensor.device != source else tensor.to(target)

    return map_tensors(move, state)
