"""Leaves of graphs that stand for parameters: aliases, and copies on another device.

A quantised weight has scales in attributes, or is made of several tensors: a copy has copies of
them all, where the layer's forward looks for them. Where the home is the memory of the host, copies
are hollow: their values come and go later, in each of these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightning_gpipe.core.data import has_own_dispatch
from lightning_gpipe.core.layout import tensors_within, with_tensors


class WeightPart(NamedTuple):
    """A tensor that a weight consists of, at home on the host, and its copy for a device."""

    weight: nn.Parameter
    at_home: Tensor
    copy: Tensor


def leaf_like(parameter: Tensor, requires_grad: bool, value: Tensor | None = None) -> nn.Parameter:
    """Return a leaf of the parameter's class with its attributes: an alias, or of other values.

    A parameter that is made of tensors can only have an alias.
    """
    kind = type(parameter)
    value = parameter if value is None else value
    leaf: Any  # isinstance calls it an nn.Parameter
    if kind is nn.Parameter or not has_own_dispatch(parameter):
        leaf = Tensor._make_subclass(kind, value, requires_grad)
    else:
        leaf = parameter.detach().requires_grad_(requires_grad)
    leaf.__dict__ = parameter.__dict__  # the very dict, so that what a layer adds to it stays
    if requires_grad and parameter.is_leaf:  # others, as from functional_call, have no grad_dtype
        dtype = getattr(parameter, "grad_dtype", parameter.dtype)  # since torch 2.10
        if dtype != parameter.dtype:
            leaf.grad_dtype = dtype
    return leaf


def copy_like(
    parameter: nn.Parameter, requires_grad: bool, device: torch.device, value: Tensor | None = None
) -> nn.Parameter:
    """Return a copy of a parameter on a device, a leaf; it may have another ``value``."""
    return _copy(parameter, requires_grad, device, partial(value_on, device=device), value)


def hollow_copy(
    weight: nn.Parameter, requires_grad: bool, device: torch.device
) -> tuple[nn.Parameter, list[WeightPart]]:
    """Return a copy of a weight on a device with placeholders for all values, and its parts."""
    if type(weight) is nn.Parameter or weight.is_meta:  # as most are
        leaf = leaf_like(weight, requires_grad, placeholder(weight, device))
        return leaf, [WeightPart(weight, weight, leaf)]

    def hollow(tensor: Tensor) -> Tensor:
        if tensor.device != weight.device:
            return tensor  # where its owner put it
        return torch.empty_like(tensor, device=device, requires_grad=False)

    leaf = _copy(weight, requires_grad, device, hollow)
    pairs = zip(parts_of(weight), parts_of(leaf), strict=True)
    parts = [WeightPart(weight, at_home, copy) for at_home, copy in pairs if at_home is not copy]
    for part in parts:
        part.copy.data = placeholder(part.at_home, device)
    return leaf, parts


def parts_of(weight: Tensor) -> list[Tensor]:
    """Return the tensors with memory of their own that a weight consists of."""
    # A mark that a library has put on a plain parameter is not needed to compute with it.
    beside = () if type(weight) is nn.Parameter else tensors_within(vars(weight))
    parts = (part for tensor in (weight, *beside) for part in _inner(tensor))
    return list({id(part): part for part in parts}.values())


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner(getattr(tensor, name))


def value_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor's values on a device."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().to(device, copy=True)


def placeholder(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of a parameter's shape with one element in memory: NaN if possible, or 0."""
    if parameter.is_floating_point() and parameter.itemsize > 1:
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
    else:
        nothing = torch.zeros((), dtype=parameter.dtype, device=device)
    return nothing.expand(parameter.shape)


def has_memory(parameter: Tensor) -> bool:
    """Return whether its elements are in memory of its own, as those of any dense tensor."""
    if parameter.layout is not torch.strided:
        return False
    return type(parameter) is nn.Parameter or not has_own_dispatch(parameter)


def _copy(
    parameter: nn.Parameter,
    requires_grad: bool,
    device: torch.device,
    change: Callable[[Tensor], Tensor],
    value: Tensor | None = None,
) -> nn.Parameter:
    """Return a leaf like a parameter, or of a ``value``, whose tensors ``change`` puts on a device.

    Attributes that are there already are shared.
    """

    def changed(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):
            return transform_subclass(tensor, lambda _, inner: changed(inner))
        return change(tensor)

    def beside(tensor: Tensor) -> Tensor:
        return leaf if tensor is parameter else changed(tensor)

    kind = type(parameter)
    leaf: Any
    own: dict[str, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        leaf = changed(parameter if value is None else value)
        if not has_own_dispatch(parameter):
            leaf = Tensor._make_subclass(kind, leaf, requires_grad)
        else:
            leaf = leaf.detach().requires_grad_(requires_grad)
            own = vars(leaf)
        attributes = {name: x for name, x in vars(parameter).items() if name not in own}
        here = all(x.device == device for x in tensors_within(attributes))
        if not here and kind is not nn.Parameter:
            attributes = with_tensors(attributes, beside)
        elif not own:
            attributes = vars(parameter)
    leaf.__dict__ = {**attributes, **own} if own else attributes
    return leaf
