"""Layers that are alike, of which one is counted and the others cost the same.

A large transformer has a thousand blocks of one kind. What they cost in operations follows from the
kinds of their modules, the shapes of their tensors and what they take, so the first of them is run
on the meta device, and its outputs stand for those of the others. Numbers that differ, such as an
index, count if that run has read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.plan import Part
from lightning_gpipe.core.profile.reads import Number, is_number, numbers_of, recording
from lightning_gpipe.core.profile.saved import SavedBytes
from lightning_gpipe.core.run import Stage

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # tensors, modules and hooks


class Ran(NamedTuple):
    """What came of a run of a layer.

    Attributes:
        costs: The fields of its profile.
        first: For each leaf of its inputs, the bytes that nobody has saved before.
        outputs: What it makes.
    """

    costs: dict[str, float]
    first: list[int]
    outputs: FlatTree


class _Counted(NamedTuple):
    """A layer that was counted: its numbers that were read, and what came of it."""

    read: dict[Number, int]
    ran: Ran
    outputs: list[bool]


class Alike:
    """What was counted so far."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[_Counted]] = {}

    def count(
        self,
        stage: Stage,
        part: Part | None,
        inputs: FlatTree,
        saved: SavedBytes,
        measure: Callable[[], Ran],
    ) -> Ran:
        """What comes of a run of a layer.

        Args:
            stage: The layer, as a stage of its own.
            part: Its part of a program, if it has one.
            inputs: What it takes.
            saved: Knows what of it was counted.
            measure: Runs it.
        """
        try:
            key = _key(stage, part, inputs, saved)
        except _Unlike:
            return measure()
        modules = list(_modules_of(stage, part))
        numbers = numbers_of(modules)
        for each in self._found.setdefault(key, []):
            if all(numbers[number] == value for number, value in each.read.items()):
                saved.count(each.ran.outputs.leaves, each.outputs)
                return each.ran
        with recording(modules) as read:
            ran = measure()
        counted = saved.are_counted(ran.outputs.leaves)
        self._found[key].append(_Counted({each: numbers[each] for each in read}, ran, counted))
        saved.count(ran.outputs.leaves, counted)
        return ran


class _Unlike(Exception):
    """Nobody knows whether a layer is like another one."""


def _key(stage: Stage, part: Part | None, inputs: FlatTree, saved: SavedBytes) -> Hashable:
    """Equal for layers that cost the same.

    Raises:
        _Unlike: If it has hooks, skip connections, or something else that cannot be compared.
    """
    if stage.arriving or stage.leaving:
        raise _Unlike
    modules = tuple(_of_module(layer, numbers=False) for layer in stage.partition.layers)
    steps = () if part is None else _of_part(part)
    leaves = inputs.leaves
    taken = tuple(map(_of_leaf, leaves)), tuple(saved.are_counted(leaves)), repr(inputs.spec)
    return modules, steps, taken, tuple(_first(leaf, leaves) for leaf in leaves)


def kind_of(module: nn.Module) -> Hashable:
    """Equal for modules that are alike; of one that cannot be compared, equal to no other's."""
    try:
        return _of_module(module)
    except _Unlike:
        return id(module)


def _modules_of(stage: Stage, part: Part | None) -> Iterator[nn.Module]:
    """The modules that a key is made of, in its order; one that is there twice comes twice."""
    steps = [] if part is None else part.steps
    called = filter(None, (_called(step.run) for step in steps))
    for layer in (*stage.partition.layers, *called):
        yield from (each for _, each in layer.named_modules(remove_duplicate=False))


def _called(run: Callable[..., Any]) -> nn.Module | None:
    """The module whose call or method it is."""
    found = run.__self__ if isinstance(run, MethodType) else run
    return found if isinstance(found, nn.Module) else None


def _of_module(module: nn.Module, *, numbers: bool = True) -> Hashable:
    """The kinds, settings and tensors of a module and those in it.

    Args:
        module: The module.
        numbers: Whether the user's numbers count.
    """
    return tuple(
        (name, type(each), *_settings(each, numbers=numbers), *_tensors(each))
        for name, each in module.named_modules(remove_duplicate=False)
    )


def _settings(module: nn.Module, *, numbers: bool) -> Iterator[Hashable]:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks) or "forward" in vars(module):
        raise _Unlike
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            counts = numbers or not is_number(module, value)
            yield name, _comparable(value) if counts else int


def _comparable(value: Any) -> Hashable:
    """Equal for what is the same to a layer: equal plain values, or the same object."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((repr(key), _comparable(each)) for key, each in value.items())
    return id(value)  # of an attribute, which lives as long as its layer


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            yield name, None if tensor is None else _of_tensor(tensor)


def _of_tensor(tensor: Tensor) -> Hashable:
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.layout


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise _Unlike


def _first(leaf: Any, leaves: Sequence[Any]) -> int:
    """The index of the first leaf that is this one."""
    return next(k for k, other in enumerate(leaves) if other is leaf)


def _of_part(part: Part) -> Hashable:
    """The calls of a part, with the values in the order in which they appear."""
    known: dict[str, str] = {}

    def renamed(text: str) -> str:
        return re.sub(r"%\d+", lambda found: known.setdefault(found[0], f"%{len(known)}"), text)

    calls = []
    for step in part.steps:
        shown = renamed(str(step).replace(f" stage {step.stage}: {step.name}(", "(", 1))
        calls.append((shown, _of_call(step.run)))
    routes = [route.numbers for route in (*part.arriving, *part.leaving)]
    ends = tuple(
        renamed(" ".join(f"%{number}" for number in numbers))
        for numbers in (part.takes, part.gives, *routes)
    )
    return tuple(calls), ends, len(part.leaving)


def _of_call(run: Callable[..., Any]) -> Hashable:
    """What is called: a module, a method of one, as of a block in a loop, or a function."""
    module = _called(run)
    if module is None:
        return run
    method = run.__func__ if isinstance(run, MethodType) else None
    return method, _of_module(module, numbers=False)
