"""Counts one of several layers that are alike, since the others cost the same.

A large transformer has a thousand blocks of one kind. Their operations follow from the kinds of
their modules, the shapes of their tensors and their inputs, so the first of them is run on the meta
device, and its outputs stand for those of the others. Blocks often differ in one number, such as
``layer_idx``, that their forwards do not read: it is for a cache, or for messages. A run that did
not read a number would have been the same with any other, so only numbers that it has read count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.profile.saved import SavedBytes
from lightning_gpipe.core.programs import Part
from lightning_gpipe.core.run import Stage

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_NOT_THE_USERS = ("torch", "lightning_gpipe")  # packages that read attributes to save or to show
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # tensors, modules and hooks


Number = tuple[int, str]  # the index of a module, and the name of its attribute


class LayerRun(NamedTuple):
    """The costs and outputs of a run of a layer.

    ``first`` has, for each leaf of its inputs, the bytes that it is the first to save.
    """

    costs: dict[str, float]
    first: list[int]
    outputs: FlatTree


class _Counted(NamedTuple):
    """A run that others may reuse: the numbers that it read, and which outputs were counted."""

    numbers: dict[Number, int]
    run: LayerRun
    outputs: list[bool]


class AlikeLayers:
    """The layers counted so far."""

    def __init__(self) -> None:
        self._counted: dict[Hashable, list[_Counted]] = {}

    def count(
        self,
        stage: Stage,
        part: Part,
        inputs: FlatTree,
        saved: SavedBytes,
        measure: Callable[[], LayerRun],
    ) -> LayerRun:
        """Run a layer, by ``measure``, or return the run of one that is alike."""
        try:
            key = _key(stage, part, inputs, saved)
        except _Unlike:
            return measure()
        modules = list(_modules_of(stage, part))
        numbers = _numbers_of(modules)
        for other in self._counted.setdefault(key, []):
            if all(numbers[number] == value for number, value in other.numbers.items()):
                saved.count(other.run.outputs.leaves, other.outputs)
                return other.run
        with _recording(modules) as numbers_read:
            run = measure()
        outputs = saved.are_counted(run.outputs.leaves)
        read = {number: numbers[number] for number in numbers_read}
        self._counted[key].append(_Counted(read, run, outputs))
        saved.count(run.outputs.leaves, outputs)
        return run


class _Unlike(Exception):
    """A layer with hooks, skip connections, or something else that cannot be compared."""


def _key(stage: Stage, part: Part, inputs: FlatTree, saved: SavedBytes) -> Hashable:
    """Return a key that is equal for layers that cost the same."""
    if stage.arriving or stage.leaving:
        raise _Unlike
    modules = tuple(_of_module(layer, numbers=False) for layer in stage.partition.layers)
    leaves = inputs.leaves
    same = tuple(next(k for k, x in enumerate(leaves) if x is leaf) for leaf in leaves)
    values = tuple(map(_of_leaf, leaves)), tuple(saved.are_counted(leaves)), repr(inputs.spec)
    return modules, _of_part(part), values, same


def kind_of(module: nn.Module) -> Hashable:
    """Return a key equal for modules that are alike; unique for one that cannot be compared."""
    try:
        return _of_module(module)
    except _Unlike:
        return id(module)


def _modules_of(stage: Stage, part: Part) -> Iterator[nn.Module]:
    """Yield the modules of a key, in its order; one that is there twice comes twice."""
    called = filter(None, (_called(step.run) for step in part.steps))
    for layer in (*stage.partition.layers, *called):
        yield from (module for _, module in layer.named_modules(remove_duplicate=False))


def _called(run: Callable[..., Any]) -> nn.Module | None:
    """Return the module whose call or method ``run`` is."""
    owner = run.__self__ if isinstance(run, MethodType) else run
    return owner if isinstance(owner, nn.Module) else None


def _of_module(module: nn.Module, *, numbers: bool = True) -> Hashable:
    """Return the kinds, settings and tensors of a module and its children."""
    return tuple(
        (name, type(child), *_settings(child, numbers=numbers), *_tensors(child))
        for name, child in module.named_modules(remove_duplicate=False)
    )


def _settings(module: nn.Module, *, numbers: bool) -> Iterator[Hashable]:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    if any(hooks) or "forward" in vars(module):
        raise _Unlike
    for name, value in vars(module).items():
        if name not in _OF_TORCH:
            counts = numbers or not _is_number(module, value)
            yield name, _comparable(value) if counts else int


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
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.layout


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return _of_tensor(leaf)
    if isinstance(leaf, _PLAIN):
        return leaf
    raise _Unlike


def _of_part(part: Part) -> Hashable:
    """Return the calls of a part, with its values numbered in order of appearance."""
    names: dict[str, str] = {}

    def renamed(text: str) -> str:
        return re.sub(r"%\d+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text)

    calls = []
    for step in part.steps:
        text = renamed(str(step).replace(f" stage {step.stage}: {step.name}(", "(", 1))
        calls.append((text, _of_call(step.run)))
    routes = [route.numbers for route in (*part.arriving, *part.leaving)]
    ends = tuple(
        renamed(" ".join(f"%{number}" for number in numbers))
        for numbers in (part.takes, part.gives, *routes)
    )
    return tuple(calls), ends, len(part.leaving)


def _of_call(run: Callable[..., Any]) -> Hashable:
    """Return a key of the call of a module, of its method, as in a loop, or of a function."""
    module = _called(run)
    if module is None:
        return run
    method = run.__func__ if isinstance(run, MethodType) else None
    return method, _of_module(module, numbers=False)


def _is_number(module: nn.Module, value: Any) -> bool:
    """Return whether an attribute is a number of a user's module."""
    return type(value) is int and not _is_ours(type(module).__module__)


def _numbers_of(modules: Iterable[nn.Module]) -> dict[Number, int]:
    """Return the numbers that modules have as attributes."""
    return {
        (k, name): value
        for k, module in enumerate(modules)
        for name, value in vars(module).items()
        if _is_number(module, value)
    }


@contextmanager
def _recording(modules: Sequence[nn.Module]) -> Iterator[set[Number]]:
    """Collect the numbers of modules that are read in a ``with`` block, ``__dict__`` reads all."""
    numbers_read: set[Number] = set()
    names: dict[int, dict[str, list[Number]]] = {}
    for k, name in _numbers_of(modules):
        own = names.setdefault(id(modules[k]), {})
        for attribute in (name, "__dict__"):
            own.setdefault(attribute, []).append((k, name))
    with ExitStack() as stack:
        for kind in dict.fromkeys(type(module) for module in modules if id(module) in names):
            stack.enter_context(_watched(kind, names, numbers_read))
        yield numbers_read


@contextmanager
def _watched(
    kind: type[nn.Module],
    names: Mapping[int, Mapping[str, list[Number]]],
    numbers_read: set[Number],
) -> Iterator[None]:
    """Record the numbers of modules of a class that are read."""
    before = vars(kind).get("__getattribute__")
    read: Callable[[Any, str], Any] = kind.__getattribute__

    def recorded(self: Any, name: str) -> Any:
        numbers = names.get(id(self), {}).get(name)
        if numbers and not (name == "__dict__" and _is_ours(sys._getframe(1).f_globals)):
            numbers_read.update(numbers)
        return read(self, name)

    kind.__getattribute__ = recorded  # type: ignore[method-assign]  # it is undone
    try:
        yield
    finally:
        if before is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = before  # type: ignore[method-assign]  # what was there


def _is_ours(module: str | Mapping[str, Any]) -> bool:
    """Return whether a Python module, by its name or variables, is not the user's."""
    name = module if isinstance(module, str) else module.get("__name__", "")
    return name.partition(".")[0] in _NOT_THE_USERS
