"""Puts modules on devices without ever having all of a large model on one of them.

Parameters stay the same objects, so an optimizer that holds them keeps working and tied ones stay
tied. A module that was built on the ``meta`` device gets its memory here, directly on its own
device; tensors that already have values, from a checkpoint, keep them, and those whose values are
in a file get them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.frontends.stored import (
    Elsewhere,
    await_value,
    is_elsewhere,
    stored_value,
)


def place(module: nn.Module, device: torch.device, created_on: torch.device | None = None) -> None:
    """Move ``module`` to ``device``; its meta tensors are created and initialised.

    Those that :func:`forget` has moved to the meta device stay there.

    Args:
        module: The module.
        device: The device.
        created_on: Where its meta tensors are created, from whose generator of random numbers they
            are initialised; None for ``device``.

    Raises:
        TypeError: If a module with meta tensors has no ``reset_parameters()``.
    """
    for each in module.modules():
        _materialise(each, created_on or device)
    if any(map(is_elsewhere, chain(module.parameters(), module.buffers()))):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move one parameter, which stays the same object, and its gradient to ``device``."""
    gradient = parameter.grad
    if is_traceable_wrapper_subclass(parameter):  # made of tensors, which .data does not replace
        made = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        made.__dict__ = {**parameter.__dict__, **made.__dict__}
        torch.utils.swap_tensors(parameter, made)
        parameter.grad = None if gradient is None else gradient.to(device)
        return
    parameter.data = parameter.data.to(device)
    if gradient is not None:
        gradient.data = gradient.data.to(device)


@contextmanager
def replaceable(*modules: nn.Module) -> Iterator[None]:
    """A ``with`` block in which the parameters of recurrent layers can be moved as others can.

    These layers have weak references to their parameters, which PyTorch does not swap then.
    """
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def forget(module: nn.Module, kept: Collection[int]) -> None:
    """Move ``module`` to the meta device, for another process has its values.

    Parameters stay the same objects. What has no values yet is created and initialised first, one
    module at a time, so that random numbers are drawn as where the values are.

    Args:
        module: The module.
        kept: The ids of parameters that keep their values.
    """
    for each in module.modules():
        _materialise(each, torch.device("cpu"))
        with replaceable(each):
            for parameter in each._parameters.values():
                if parameter is not None and id(parameter) not in kept:
                    forget_values(parameter)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = empty = torch.empty_like(buffer, device="meta")
                await_value(empty, Elsewhere())


def forget_values(parameter: nn.Parameter) -> None:
    """Move one parameter, which stays the same object, to the meta device."""
    if not parameter.is_meta:
        empty = torch.empty_like(parameter, device="meta")
        kind: Any = type(parameter)
        made = Tensor._make_subclass(kind, empty, parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, made)
        await_value(parameter, Elsewhere())


def place_around(root: nn.Module, inner: Collection[nn.Module], device: torch.device) -> None:
    """Move all of ``root`` except the modules in ``inner`` to ``device``."""
    if root in inner:
        return
    if not any(module in inner for module in root.modules()):
        place(root, device)
        return
    for child in root.children():
        place_around(child, inner, device)
    place_own(root, device)


def place_own(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of ``module`` itself, and none of the modules within it."""
    _materialise(module, device)
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` is on the meta device."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Create the meta tensors of ``module`` on ``device``, not those of the modules within it."""
    tensors = chain(module._parameters.values(), module._buffers.values())
    own = [tensor for tensor in tensors if tensor is not None and not is_elsewhere(tensor)]
    if not any(tensor.is_meta for tensor in own):
        return
    in_files = [(t, stored) for t in own if t.is_meta and (stored := stored_value(t)) is not None]
    missing = len(in_files) < sum(tensor.is_meta for tensor in own)
    initialise = initialiser(module) if missing else lambda: None
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)
    kept = [(t, t.detach().clone()) for t in own if missing and not t.is_meta]
    with replaceable(module):
        for tensor in own:
            if tensor.is_meta:
                torch.utils.swap_tensors(tensor, _created(tensor, device))
    initialise()
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    for tensor, stored in in_files:
        stored.read_into(tensor)


def initialiser(module: nn.Module) -> Callable[[], None]:
    """What initialises the tensors of a module.

    Raises:
        TypeError: If nothing does.
    """
    for name in ("reset_parameters", "_reset_parameters"):  # PyTorch has both spellings
        initialise = getattr(module, name, None)
        if callable(initialise):
            return initialise
    raise TypeError(
        "a module with parameters or buffers on the meta device must have reset_parameters() to "
        f"initialise them: got {type(module).__name__} without. Write one, or build it on the CPU; "
        "under lightning_gpipe.pretrained.parameters_on_meta() buffers have their values."
    )


def _created(tensor: Tensor, device: torch.device) -> Tensor:
    created = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(created, tensor.requires_grad)
    return created
