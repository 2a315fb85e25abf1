"""The state and the reach of an optimizer, found by steps of others like it.

The bytes that it keeps for each are counted after a step on the meta device, or on zeros if it
reads values. Whether it updates each by itself shows when another one's gradients change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpipe.core.data import bytes_of, tensors_of

_STEPS = 10  # Prodigy, by default, has the step size of its first one for five

# Optimizers over the parameters of a model, or a function of a list of parameters.
Optimizers = Optimizer | Sequence[Optimizer] | Callable[[list[nn.Parameter]], Optimizer] | None


def optimizer_bytes(parameters: Iterable[nn.Parameter], optimizer: Optimizers) -> dict[int, int]:
    """Return the bytes of the state for each parameter that requires a gradient, by its id.

    The optimizer may be several; or its class, or a function of a list of parameters that returns
    one; None keeps nothing. Raises a TypeError for anything else, and a ValueError if it cannot
    make a step.
    """
    if optimizer is None:
        return {}
    trained = {id(p): p for p in parameters if p.requires_grad}
    if isinstance(optimizer, Optimizer):
        optimizer = [optimizer]
    if isinstance(optimizer, list | tuple) and all(isinstance(o, Optimizer) for o in optimizer):
        sizes: dict[int, int] = {}
        for group, make in [(g, _like(o, g)) for o in optimizer for g in o.param_groups]:
            sizes |= _of_each([p for p in group["params"] if id(p) in trained], make)
        return sizes
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be an optimizer, its class, or a function that makes one of a list of "
            f"parameters: got {optimizer!r}. Write optimizer=torch.optim.AdamW, or "
            "partial(torch.optim.SGD, lr=0.1, momentum=0.9)."
        )
    return _of_each(trained.values(), optimizer)


def _of_each(
    parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], Optimizer]
) -> dict[int, int]:
    """Return the bytes for each parameter, by its id; one step is made for each shape."""
    of_shape: dict[Any, int] = {}
    sizes = {}
    for parameter in parameters:
        key = parameter.shape, parameter.dtype, parameter.stride()
        if key not in of_shape:
            of_shape[key] = _of_one(parameter, make)
        sizes[id(parameter)] = of_shape[key]
    return sizes


def joins_parameters(optimizer: Optimizer) -> bool:
    """Return True if updates of a parameter depend on the gradients of others.

    So it is with a norm over all of them, as in LAMB, or a step size for all. False if the
    optimizer cannot be tried.
    """
    for group in optimizer.param_groups:
        make = _like(optimizer, {**group, "lr": 1.0})  # a warm-up may begin with none
        try:
            beside_same, beside_others = (_stepped_beside(factor, make) for factor in (1.0, -10.0))
        except Exception:
            continue
        if not torch.equal(beside_same, beside_others):
            return True
    return False


def _stepped_beside(factor: float, make: Callable[[list[nn.Parameter]], Optimizer]) -> Tensor:
    """Return a parameter after some steps, beside one with gradients of another size, and sign."""
    values = torch.linspace(0.1, 0.4, 4, dtype=torch.float64).view(2, 2)
    first, second = nn.Parameter(values), nn.Parameter(values.clone())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of an optimizer that draws
        optimizer = make([first, second])
        for number in range(_STEPS):
            first.grad, second.grad = values.clone(), values * factor ** (number + 1)
            optimizer.step(lambda: 0.0)
    return first.detach()


# Options of how a step is computed, not of the state; some do not work on meta tensors.
_IMPLEMENTATIONS = ("params", "foreach", "fused", "capturable", "differentiable")


def _like(optimizer: Optimizer, group: dict[str, Any]) -> Callable[..., Optimizer]:
    """Return a function that makes an optimizer of that class, with the options of a group."""
    kind = type(optimizer)
    options = signature(kind).parameters.keys() - _IMPLEMENTATIONS
    return partial(kind, **{name: value for name, value in group.items() if name in options})


def _of_one(parameter: nn.Parameter, make: Callable[[list[nn.Parameter]], Optimizer]) -> int:
    try:
        state = _state_of(torch.empty_like(parameter, device="meta"), make)
    except Exception:
        try:  # some read values
            state = _state_of(torch.zeros_like(parameter, device="cpu"), make)
        except Exception as error:
            raise ValueError(
                "an optimizer must be able to make a step, so that its state can be counted: "
                f"{make!r} raised {type(error).__name__}: {error}. In a Trainer, write "
                "balance='time', 'parameters' or a list, and values in place of 'auto'. Elsewhere, "
                "pass another one whose state is of the same size, such as "
                "optimizer=torch.optim.AdamW, or None."
            ) from error
    return sum(map(bytes_of, tensors_of(state)))


def _state_of(stand_in: Tensor, make: Callable[[list[nn.Parameter]], Optimizer]) -> dict[str, Any]:
    parameter = nn.Parameter(stand_in.detach())
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    return dict(optimizer.state[parameter])
