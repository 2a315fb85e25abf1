"""Kinds of modules: equal keys for modules that compute the same on equal inputs.

The operations of a module follow from the classes of its modules, their attributes, and the shapes
of their tensors. One with hooks, or with a forward of its own, is like no other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # tensors, modules and hooks
_NUMBERS = frozenset({"layer_idx", "layer_index", "layer_id", "block_idx", "idx", "index"})


def kind_of(module: nn.Module, numbered: bool = True) -> Hashable:
    """Return a key equal for modules that are alike; unique for one that cannot be compared.

    Unless ``numbered``, they may differ in attributes that have their own numbers.
    """
    if any(map(_is_changed, module.modules())):
        return id(module)
    return tuple(
        (name, type(child), *_settings(child, numbered), *_tensors(child))
        for name, child in module.named_modules(remove_duplicate=False)
    )


def structure_of(module: nn.Module) -> Hashable:
    """Return a key equal for modules that return values of the same structure and shapes.

    It takes less to be so than to be alike: the classes, numbers and flags, and shapes.
    """
    return tuple(
        (type(child), *_sizes(child), *(x.shape for x in _slots(child) if not is_lazy(x)))
        for child in module.modules()
    )


def _sizes(module: nn.Module) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        items = value if isinstance(value, tuple) else (value,)
        if all(isinstance(x, PLAIN) for x in items) and name not in _NUMBERS | {"training"}:
            yield name, value


def _slots(module: nn.Module) -> Iterator[Tensor]:
    slots = (*module._parameters.values(), *module._buffers.values())
    return (x for x in slots if x is not None)


def _is_changed(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or "forward" in vars(module)


def _settings(module: nn.Module, numbered: bool) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        own_number = not numbered and name in _NUMBERS and isinstance(value, int)
        if name not in _OF_TORCH and not own_number:
            yield name, _comparable(value)


def _comparable(value: Any) -> Hashable:
    """Return a key that is equal for equal plain values, or for the same object."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((repr(k), _comparable(v)) for k, v in value.items())
    return id(value)  # of an attribute, which lives as long as its layer


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            yield name, None if tensor is None else kind_of_tensor(tensor)


def kind_of_tensor(tensor: Tensor) -> Hashable:
    """Return a key equal for tensors on which operations do the same, whatever their values."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    strides = tensor.stride() if dense else tensor.layout
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, strides
