"""Python attributes that layers change in forward: ``self.steps += 1``, ``self.cache = y``.

A layer that reads such an attribute computes something else when it runs again. So a recomputation
gets the attributes of modules, of objects that they hold, and of parameters from before the first
forward, and afterwards the modules get those back that the first forwards left. Attributes are
compared by identity, contents of lists, dicts and tensors as far as they were copied. A tensor that
the recomputation leaves replaces that of the first forward, for its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.faithful.journal import ABSENT, Journal, Write, value_in
from lightning_gpipe.core.faithful.managers import Bracket, Manager
from lightning_gpipe.core.faithful.state.contents import Contents, Left, has_contents, left_in
from lightning_gpipe.core.layout import Holder, Slot, holders, parameter_holders

Values = Sequence[Sequence[Any]]  # of all attributes, holder by holder


class Owners:
    """The attributes of some modules, their objects and parameters, as they are at one time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = tuple(modules)
        of_modules = list(holders(modules))
        self.holders = [*of_modules, *parameter_holders(modules)]
        self.names: list[tuple[str, ...]] = []
        self.containing: list[tuple[Holder, str]] = []  # attributes with contents
        self._getters: list[tuple[Any, dict[str, Any]]] = []
        self._slots = [holder.slots for holder in self.holders]
        self._size = sum(map(len, self._slots))
        for holder in self.holders:
            held = holder.held
            if held:
                names = [*held, *held] if len(held) == 1 else held  # for two it returns a tuple
                self._getters.append((itemgetter(*names), holder.slots))
            self.names.append(tuple(held))
        # Not of parameters: a copy of what quantised weights are made of would be a second model.
        for holder in of_modules:
            held = holder.held
            self.containing += [(holder, name) for name in held if has_contents(held[name])]

    def values(self) -> Values | None:
        """Return the present values of all attributes; None if some were added or removed."""
        if sum(map(len, self._slots)) != self._size:  # one added and one removed: KeyError
            return None
        try:
            return [get(slots) for get, slots in self._getters]
        except KeyError:
            return None

    def moved(self, before: Values) -> bool:
        present = self.values()
        return present is None or not all(map(is_, _flat(before), _flat(present)))

    def attributes(self, values: Values) -> Iterator[tuple[Holder, dict[str, Any]]]:
        remaining = iter(values)
        for holder, names in zip(self.holders, self.names, strict=True):
            yield holder, dict(zip(names, next(remaining), strict=False)) if names else {}


_NO_OWNERS, _NO_SLOTS = Owners(()), frozenset[Slot]()
_flat = chain.from_iterable


class AttributeState:
    """The attributes of some modules before a run; once compared, what the run changed.

    ``changed`` are the attributes whose contents the first run changed; None if this is the first.
    """

    def __init__(self, owners: Owners, values: Values, changed: frozenset[Slot] | None) -> None:
        self._owners = owners
        self._values = values
        self._first = first = changed is None
        self._writes: list[Write] = []
        self._left: list[Left] = []
        self._contents: list[tuple[Slot, Contents, bool]] = []  # whether every run changes it
        for holder, name in owners.containing:
            slot = holder.module, holder.prefix + name
            expected = changed is not None and slot in changed
            contents = Contents(holder.slots[name], copied=first or expected)
            self._contents.append((slot, contents, expected))

    def compare(self, *, linked: bool) -> frozenset[Slot]:
        """Return the attributes whose contents the run changed; raise if some were not saved.

        ``linked``: layers use tensors that earlier runs left there, and their gradients.
        """
        owners, values, all_contents = self._owners, self._values, self._contents
        self._owners, self._values, self._contents = _NO_OWNERS, (), []  # they may hold much memory
        if not (all_contents or owners.moved(values)):
            return _NO_SLOTS
        changed = [
            (slot, contents)
            for slot, contents, expected in all_contents
            if expected or contents.moved(compared=self._first)
        ]
        copies: dict[int, Tensor] = {}
        for slot, contents in changed:
            if contents.lost:
                raise RuntimeError(_lost(slot))
            module, name = slot
            title = f"the attribute {name!r} of {type(module).__name__}"
            copies.update(contents.values(title, linked=linked))
        for _, contents in changed:
            self._writes += contents.writes(copies)
            self._left += contents.left()
        if copies or owners.moved(values):
            for holder, old in owners.attributes(values):
                for name, value in _restored(holder, old, copies):
                    self._writes.append((holder.slots, name, value))
                    self._left += left_in(holder.slots, name)
        return frozenset(slot for slot, _ in changed)

    @property
    def changed(self) -> set[Slot]:
        """The attributes that the run has assigned, or whose contents it has changed."""
        assigned = {
            (holder.module, holder.prefix + name)
            for holder, old in self._owners.attributes(self._values)
            for name, _ in _restored(holder, old, {})
        }
        moved = (slot for slot, x, _ in self._contents if x.moved(compared=self._first))
        return assigned.union(moved)

    def restore(self) -> None:
        self.compare(linked=True)
        Journal().write(self._writes)

    def swapped_in(self, journal: Journal) -> list[Manager]:
        if not self._writes:
            return []
        return [Bracket(partial(journal.write, self._writes), partial(self._undo, journal))]

    def _undo(self, journal: Journal, length: int) -> None:
        """Undo the changes of a recomputation, but for tensors with its graph."""
        again = [value_in(slots, name) for slots, name, _ in self._left]
        journal.undo(length)
        for (slots, name, first), tensor in zip(self._left, again, strict=True):
            if isinstance(tensor, Tensor) and value_in(slots, name) is first():
                slots[name] = tensor


def _restored(
    holder: Holder, old: Mapping[str, Any], values: Mapping[int, Tensor]
) -> Iterator[tuple[str, Any]]:
    """Yield the old attributes, with ``values`` instead of tensors that were edited."""
    for name, value in old.items():
        if holder.slots.get(name, ABSENT) is not value or id(value) in values:
            yield name, values.get(id(value), value)
    yield from ((name, ABSENT) for name in holder.held if name not in old)


def _lost(slot: Slot) -> str:
    module, name = slot
    return (
        f"{type(module).__name__} must change what its attribute {name!r} contains in every "
        "forward or in none: it did for the first time after an earlier run that did not, and the "
        "contents before are needed for recomputation. Assign a new object to the attribute "
        "instead of changing it, or write activation_checkpointing='never'. If it is a layer of "
        "another stage that changes the object, at the same time, give each layer its own."
    )
