"""The values of a recording for a few rows, computed on demand by runs without lasting effects."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import receiving
from lightning_gpipe.core.faithful import (
    RECOMPUTING,
    Bracket,
    LazyManagers,
    Manager,
    drawing_by_default,
    patched,
    preserved,
    record,
)
from lightning_gpipe.core.frontends.cuts import Cut, few_of, scaled
from lightning_gpipe.core.frontends.module_list.blocks import running
from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    Path,
    Reading,
    leaves_in,
    map_leaves,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import (
    RecordedCall,
    TensorLeaf,
    with_returned_arguments,
)
from lightning_gpipe.core.frontends.module_list.tape.tape import Tape, is_plain
from lightning_gpipe.core.layout import is_user_object, tensors_within
from lightning_gpipe.core.programs import Step, Value


def without_effects(modules: Iterable[nn.Module], device: torch.device) -> Manager:
    """Restore the state of modules and of random number generators at the end of a ``with`` block.

    The modules, and all within them, run without gradients, as in a recomputation:
    :func:`~lightning_gpipe.is_recomputing` returns True. They draw on the device and on the CPU.
    """
    inner = tuple(within for module in modules for within in module.modules())

    def managers() -> Iterator[Manager]:
        yield preserved(inner, [device], parameters=True)
        yield Bracket(partial(RECOMPUTING.set, True), RECOMPUTING.reset)
        # The parameters on another device, of a stage that shares them.
        elsewhere = [
            (module._parameters, name, p)
            for module in inner
            for name, p in module._parameters.items()
            if p is not None and not p.is_meta and p.device != device
        ]
        copies = {p: _on(p, device) for _, _, p in elsewhere}
        yield patched([(slots, name, copies[p]) for slots, name, p in elsewhere])
        yield drawing_by_default()  # whose states are restored, in this process alone
        yield running()
        yield torch.no_grad()
        # Warnings, and loss terms, come again when the pipeline runs.
        yield receiving(lambda term: None)
        yield warnings.catch_warnings(action="ignore")

    return LazyManagers(managers)


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    with torch.no_grad():
        moved = parameter.to(device)  # a quantised one keeps its class
    if isinstance(moved, nn.Parameter):
        return moved
    return nn.Parameter(moved, parameter.requires_grad)


def deep_copy(value: Any) -> Any:
    """Return a deep copy of an object, with its tensors detached."""
    return copy.deepcopy(value, {id(x): x.detach().clone() for x in tensors_within(value)})


def fingerprint(value: Any) -> list[tuple[int, int]]:
    """Return a value that differs after an object got tensors, or its tensors were edited."""
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors_within(value)]


# Runs a function in the process of a stage; returns its result, in all processes.
Rehearse = Callable[[int, Callable[[], Any]], Any]

_SHAPES = 1000  # that are kept of a kind of call


def only_here(stage: int, function: Callable[[], Any]) -> Any:
    """Run the function: :data:`Rehearse` for a pipeline in one process."""
    return function()


@dataclass(eq=False)
class Samples:
    """The values of one recording for ``few`` of its rows, or for all; its ``tape`` may grow.

    ``inputs`` has the tensors from outside; ``rehearse`` runs calls of a stage, for all processes.
    """

    tape: Tape
    inputs: Mapping[int, tuple[Tensor, Reading]]
    rows: int
    rehearse: Rehearse

    def __post_init__(self) -> None:
        self.few: int | None = None
        if self.rows > 1:
            self.few = 3 if self.rows == 2 else 2  # so that a whole tensor does not fit
        self._values: dict[int, Any] = {}
        self._values_of_kinds: dict[Any, Any] = {}

    @property
    def single(self) -> bool:
        """True if the program must run in one micro-batch."""
        return self.few is None

    def __getitem__(self, number: int) -> Any:
        if number not in self._values:
            self._values[number] = self._compute(number)
        return self._values[number]

    def __setitem__(self, number: int, value: Any) -> None:
        self._values[number] = value
        self._values_of_kinds[self._kind(number)] = value

    def shape_of(self, number: int) -> torch.Size:
        if number in self.inputs:
            return self.inputs[number][0].shape
        entry = self.tape.calls.get(number)
        if entry is None:  # made of an input
            return self.scaled(self[number].shape, (1, 0, False))
        knowledge, step = entry.knowledge, self.tape.steps[entry.number]
        leaves = leaves_in((step.args, dict(step.kwargs)))
        key = tuple(
            self.shape_of(x.number) if isinstance(x, Value) else repr(x) if is_plain(x) else None
            for _, x in leaves
        )
        if key not in knowledge.shapes:
            sample = self[entry.number]
            values = [sample] if knowledge.result.single else sample
            pairs = zip(values, knowledge.result.leaves, strict=True)
            shapes = [
                self.scaled(x.shape, leaf.cut) if isinstance(leaf, TensorLeaf) else None
                for x, leaf in pairs
            ]
            record(knowledge.shapes, key, shapes, _SHAPES)
        shape = knowledge.shapes[key][entry.numbers.index(number)]
        assert shape is not None, "placeholders stand for tensors"
        return shape

    def take_all(self) -> None:
        if not self.single:
            self.few = None
            self.clear()

    def clear(self) -> None:
        self._values, self._values_of_kinds = {}, {}

    def scaled(self, shape: torch.Size, cut: Cut) -> torch.Size:
        """Return the shape with all rows of a value that has this one in the sample."""
        return shape if self.few is None else scaled(shape, cut, self.few, self.rows)

    def _compute(self, number: int) -> Any:
        if number in self.inputs:
            tensor, reading = self.inputs[number]
            # An input with several entries per row is stored by rows: see OutsideTensors.
            return few_of(tensor, (min(reading, 1), 0, False), self.rows, self.few)
        step = self.tape.steps[number]
        entry = self.tape.calls.get(number)
        if entry is None or number != entry.number:
            return step({value: self[value] for value in step.needs})
        kind = self._kind(number)
        if kind not in self._values_of_kinds:
            self._values_of_kinds[kind] = self._run(step, entry.call)
        return self._values_of_kinds[kind]

    def _run(self, step: Step, call: RecordedCall) -> Any:
        objects: list[tuple[Path, Any]] = []

        def sample(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return self[leaf.number].to(call.device, copy=True)
            if not is_user_object(leaf):
                return leaf
            objects.append((path, deep_copy(leaf)))
            return objects[-1][1]

        args, kwargs = map_leaves(sample, (step.args, dict(step.kwargs)))

        def run() -> Any:
            with without_effects(call.modules, call.device):
                result = with_returned_arguments(step.run(*args, **kwargs), objects)
                return result if step.then is None else step.then(result)

        return self.rehearse(call.stage, run)

    def _kind(self, number: int) -> tuple[int, tuple[torch.Size, ...]]:
        """Return a key that is equal for calls that return values of the same shapes."""
        step = self.tape.steps[number]
        leaves = (leaf for _, leaf in leaves_in((step.args, dict(step.kwargs))))
        shapes = tuple(self[leaf.number].shape for leaf in leaves if isinstance(leaf, Value))
        return id(self.tape.calls[number].knowledge), shapes
