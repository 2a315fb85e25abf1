"""Values that the caller's code leaves to layers, while stages work on other micro-batches.

A module around the layers may compute the scale of one: ``block.scale = self.hyper(condition)``.
With a loss for each micro-batch, a stage would find the scale of a later one. So all micro-batches
must have the same. The same is true of a context variable: stages have that of micro-batch 0.

Layers set attributes, too, on other threads. So the places are found before any layer runs. All
that layers hold is searched in the first mini-batches only, which takes milliseconds for a hundred
layers; later, attributes and buffers that are others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.data import PendingTensor, equal, term_receiver
from lightning_gpipe.core.layout import Holder, Partition, holders, within

_SEARCHES = 2  # the second, for what is set there once the model has run
_LARGE = 64  # elements of containers, which are not searched
_UNSET = object()

# The attributes of a module or an object, and one of the names; or context variables, and one.
_Place = tuple[Mapping[Any, Any], Any]
_Slots = tuple[str, Mapping[str, Any]]  # the name of a module, and its attributes


class ValuesOnLayers:
    """Compares the values that the caller's code leaves to layers of some stages before its call.

    Context variables among ``variables`` are no part of the caller's code.
    """

    def __init__(
        self, partitions: Sequence[Partition], variables: Collection[ContextVar[Any]] = ()
    ) -> None:
        self._partitions = partitions
        self._others = {term_receiver, *variables}
        self._searches = 0
        self._before: dict[str, list[Any]] = {}
        self._slots: list[_Slots] = []  # of all modules, once they are not searched
        self._held: list[Mapping[str, Any]] = []  # what they had before the code
        self._places: dict[str, _Place] = {}  # where the code keeps values, by name
        self._variables: set[ContextVar[Any]] = set()  # that the code has set
        self._first: dict[str, list[Any]] = {}  # the values for micro-batch 0

    def begin(self) -> None:
        self._searches += 1
        if self._searches <= _SEARCHES:
            self._before = {name: _values(place) for name, place in self._all()}
        else:
            self._slots = self._slots or list(self._modules())
            self._held = [dict(slots) for _, slots in self._slots]

    def at_call(self, i: int, before: Context, variables: Context) -> list[Tensor]:
        """Return the tensors that the code for micro-batch ``i`` has left to layers at its call.

        ``before`` and ``variables`` are the context variables before the code and at its call.
        Raises a RuntimeError if values differ from those for micro-batch 0.
        """
        if not i:
            self._find_places()
        values = {name: _values(place) for name, place in self._places.items()}
        self._variables |= {x for x, v in variables.items() if before.get(x, _UNSET) is not v}
        for x in self._variables:
            values[f"context variable {x.name!r}"] = _values((variables, x))
        if not i:
            self._first = values
        if (changed := self._changed(values)) is not None:
            raise RuntimeError(
                "a value that training_step keeps on a layer or in a context variable must be the "
                f"same for all micro-batches: got another {changed} for micro-batch {i} than for "
                "micro-batch 0, for which stages may be at work yet. Pass it to the layers with "
                "their input, which goes with its micro-batch."
            )
        return [x for items in values.values() for x in items if isinstance(x, Tensor)]

    @property
    def left(self) -> list[str]:
        """The names of the values that the code has left to layers, since the first mini-batch."""
        variables = self._variables - self._others
        return [*self._places, *(f"context variable {x.name}" for x in variables)]

    @property
    def numbers(self) -> dict[str, list[Any]]:
        """The numbers and strings that the code has left for micro-batch 0, by name."""
        found = {
            name: [x for x in v if not isinstance(x, Tensor)] for name, v in self._first.items()
        }
        return {name: items for name, items in found.items() if items}

    def at_end(self, i: int) -> None:
        """Raise RuntimeError if they have changed at the end of the code for micro-batch ``i``."""
        values = {name: _values(place) for name, place in self._places.items()}
        if (changed := self._changed(values)) is not None:
            raise RuntimeError(
                "a value that training_step keeps on a layer must stay there for all "
                f"micro-batches: got another {changed} after the call of the pipeline for "
                f"micro-batch {i}, while stages may be at work for others. Set it in "
                "on_train_batch_start, and set it back in on_train_batch_end."
            )

    def end(self) -> None:
        self._before, self._held, self._first, self._variables = {}, [], {}, set()

    def _find_places(self) -> None:
        for name, place in self._all() if self._before else ():
            if list(map(id, _values(place))) != list(map(id, self._before.get(name, ()))):
                self._places[name] = place
        for (path, slots), held in zip(self._slots, self._held, strict=False):
            if len(slots) == len(held) and all(map(is_, slots.values(), held.values())):
                continue
            for name, value in slots.items():
                if held.get(name, _UNSET) is not value:
                    self._places[f"{path}.{name}"] = slots, name

    def _changed(self, values: dict[str, list[Any]]) -> str | None:
        for name, items in values.items():
            first = self._first.get(name, [])
            if len(items) != len(first) or not all(map(_equal, items, first)):
                return name
        return None

    def _all(self) -> Iterator[tuple[str, _Place]]:
        for path, module in self._named_modules():
            yield f"{path}.training", (vars(module), "training")
            buffers: dict[str, Any] = module._buffers
            for holder in (*holders([module]), Holder(module, "", buffers)):
                for name in holder.held:
                    yield f"{path}.{holder.prefix}{name}", (holder.slots, name)

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for partition in self._partitions:
            for title, layer in partition.titled_layers:
                yield from layer.named_modules(prefix=title)

    def _modules(self) -> Iterator[_Slots]:
        for path, module in self._named_modules():
            yield path, vars(module)
            yield path, module._buffers


def _values(place: _Place) -> list[Any]:
    """Return the numbers and tensors in a place, which may have no value yet."""
    slots, name = place
    try:
        value = slots[name]  # the buffers of a scripted module have no get()
    except KeyError:
        return []
    if isinstance(value, bool | int | float | str):
        return [value]
    tensors = [item for item in within(value, largest=_LARGE) if isinstance(item, Tensor)]
    return [item for item in tensors if not isinstance(item, PendingTensor)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or equal(one, other)
    return bool(one == other)
