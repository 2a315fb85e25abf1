"""Finds layers that are alike, since they cost the same.

The kinds of modules, their attributes, and the shapes of their tensors and inputs decide. Only the
first one of alike layers is counted, and its outputs stand for those of the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.programs import Part
from lightning_gpipe.core.run import Stage

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # tensors, modules and hooks
_NUMBERS = frozenset({"layer_idx", "layer_index", "layer_id", "block_idx", "idx", "index"})


class _Unlike(Exception):
    """A layer with hooks, skip connections, or something else that cannot be compared."""


def key_of(stage: Stage, part: Part, inputs: FlatTree, *, numbered: bool = True) -> Hashable:
    """Return a key equal for layers that cost the same; unique for one that cannot be compared.

    Unless ``numbered``, layers may differ in attributes that have their own numbers.
    """
    try:
        return _key(stage, part, inputs, numbered)
    except _Unlike:
        return id(stage)


def _key(stage: Stage, part: Part, inputs: FlatTree, numbered: bool) -> Hashable:
    if stage.arriving or stage.leaving:
        raise _Unlike
    modules = tuple(_of_module(layer, numbered) for layer in stage.partition.layers)
    leaves = inputs.leaves
    same = tuple(next(k for k, x in enumerate(leaves) if x is leaf) for leaf in leaves)
    values = tuple(map(_of_leaf, leaves)), repr(inputs.spec)
    return modules, _of_part(part, numbered), values, same


def kind_of(module: nn.Module, *, numbered: bool = True) -> Hashable:
    """Return a key equal for modules that are alike; unique for one that cannot be compared."""
    try:
        return _of_module(module, numbered)
    except _Unlike:
        return id(module)


def repeated(stages: Sequence[Stage]) -> list[bool]:
    """Return for each stage whether the modules of another one are alike but for their numbers."""
    kinds = [
        tuple(kind_of(layer, numbered=False) for layer in stage.partition.layers)
        for stage in stages
    ]
    counts = Counter(kinds)
    return [counts[kind] > 1 for kind in kinds]


def _of_module(module: nn.Module, numbered: bool = True) -> Hashable:
    return tuple(
        (name, type(child), *_settings(child, numbered), *_tensors(child))
        for name, child in module.named_modules(remove_duplicate=False)
    )


def _settings(module: nn.Module, numbered: bool) -> Iterator[Hashable]:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks) or "forward" in vars(module):
        raise _Unlike
    for name, value in vars(module).items():
        own_number = not numbered and name in _NUMBERS and isinstance(value, int)
        if name not in _OF_TORCH and not own_number:
            yield name, _comparable(value)


def _comparable(value: Any) -> Hashable:
    """Return a key that is equal for equal plain values, or for the same object."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((repr(k), _comparable(v)) for k, v in value.items())
    return id(value)  # of an attribute, which lives as long as its layer


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            yield name, None if tensor is None else _of_tensor(tensor)


def _of_tensor(tensor: Tensor) -> Hashable:
    dense = tensor.layout is torch.strided and not tensor.is_nested
    strides = tensor.stride() if dense else tensor.layout
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, strides


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise _Unlike


def _of_part(part: Part, numbered: bool) -> Hashable:
    """Return the calls of a part, with its values numbered in order of appearance."""
    names: dict[str, str] = {}

    def renamed(text: str) -> str:
        return re.sub(r"%\d+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text)

    calls = []
    for step in part.steps:
        text = renamed(str(step).replace(f" stage {step.stage}: {step.name}(", "(", 1))
        calls.append((text, _of_call(step.run, numbered)))
    routes = [route.numbers for route in (*part.arriving, *part.leaving)]
    ends = tuple(
        renamed(" ".join(f"%{number}" for number in numbers))
        for numbers in (part.takes, part.gives, *routes)
    )
    return tuple(calls), ends, len(part.leaving)


def _of_call(run: Callable[..., Any], numbered: bool) -> Hashable:
    method, owner = (run.__func__, run.__self__) if isinstance(run, MethodType) else (None, run)
    return (method, _of_module(owner, numbered)) if isinstance(owner, nn.Module) else run
