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

from lightning_gpipe.core.faithful.journal import ABSENT, Journal, Slots, Write, value_in
from lightning_gpipe.core.faithful.managers import Bracket, Manager
from lightning_gpipe.core.faithful.state.contents import Contents, Left, has_contents, left_in
from lightning_gpipe.core.layout import (
    Holder,
    Slot,
    holders,
    is_generator,
    parameter_holders,
    user_objects,
)

Values = Sequence[Sequence[Any]]  # of all attributes, holder by holder


class Owners:
    """The attributes of some modules, their objects and parameters, as they are at one time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = tuple(modules)
        of_modules = list(holders(modules))
        self.holders = [*of_modules, *parameter_holders(modules)]
        self.names: list[tuple[str, ...]] = []
        self.containing: dict[Slot, tuple[Slots, str]] = {}  # attributes with contents
        self._getters: list[itemgetter[Any]] = []
        self._read: list[Slots] = []  # the slots that each of them reads
        self._attributes: list[Slot] = []  # all, in the order of the getters
        self._former: list[Any] = []
        self._slots = [holder.slots for holder in self.holders]
        self._size = sum(map(len, self._slots))
        for number, holder in enumerate(self.holders):
            held = holder.held
            self.names.append(tuple(held))
            if not held:
                continue
            names = [*held, *held] if len(held) == 1 else [*held]  # for two it returns a tuple
            self._getters.append(itemgetter(*names))
            self._read.append(holder.slots)
            self._attributes += map(holder.slot, names)
            self._former += map(held.__getitem__, names)
            # Not of parameters: a copy of what quantised ones are made of would be a second model.
            for name in held if number < len(of_modules) else ():
                if has_contents(held[name]):
                    self.containing[holder.slot(name)] = holder.slots, name

    def values(self) -> Values | None:
        """Return the present values of all attributes; None if others are to be looked at."""
        if sum(map(len, self._slots)) != self._size:  # one added and one removed: KeyError
            return None
        try:
            present = [*map(itemgetter.__call__, self._getters, self._read)]
        except KeyError:
            return None
        assigned = not all(map(is_, self._former, _flat(present)))
        if assigned and any(map(self._holds_more, self._attributes, self._former, _flat(present))):
            return None
        return present

    def _holds_more(self, slot: Slot, former: Any, present: Any) -> bool:
        """Return True for a new object or generator, or contents where there were none."""
        if present is former:
            return False
        if is_generator(present) or user_objects(present):
            return True
        return slot not in self.containing and has_contents(present)

    def moved(self, before: Values) -> bool:
        """Return True if attributes are others than before, or other objects."""
        if sum(map(len, self._slots)) != self._size:
            return True
        try:
            present = map(itemgetter.__call__, self._getters, self._read)
            return not all(map(is_, _flat(before), _flat(present)))
        except KeyError:
            return True

    def attributes(self, values: Values) -> Iterator[tuple[Holder, dict[str, Any]]]:
        remaining = iter(values)
        for holder, names in zip(self.holders, self.names, strict=True):
            yield holder, dict(zip(names, next(remaining), strict=False)) if names else {}


_flat = chain.from_iterable


class AttributeState:
    """The attributes of some modules before a run; once compared, what the run changed.

    ``changed`` tells whether earlier runs changed the contents of attributes, for those that they
    had. Of others all contents are copied, and compared by their values.
    """

    def __init__(self, owners: Owners, values: Values, changed: Mapping[Slot, bool]) -> None:
        self._owners = owners
        self._values = values
        self._copies: dict[int, Tensor] = {}  # of tensors that the run edited, by their ids
        self._writes: list[Write] = []  # of what the run changed
        self._left: list[Left] = []
        self._unchanged: list[tuple[Slot, Contents]] = []  # which a later run may change
        self._contents: list[tuple[Slot, Contents, bool | None]] = []
        for slot, (slots, name) in owners.containing.items():
            expected = changed.get(slot)
            contents = Contents(slots[name], copied=expected is not False)
            self._contents.append((slot, contents, expected))

    def compare(self, *, linked: bool) -> dict[Slot, bool]:
        """Return of which attributes the contents changed; raise if such were not saved.

        ``linked``: layers use tensors that earlier runs left there, and their gradients.
        """
        if not (self._contents or self._owners.moved(self._values)):
            return {}
        changed = {slot: contents for slot, contents, expected in self._contents if expected}
        changed |= self._moved()
        for slot, contents in changed.items():
            _refuse_lost(slot, contents)
            module, name = slot
            title = f"the attribute {name!r} of {type(module).__name__}"
            self._copies.update(contents.values(title, linked=linked))
        for contents in changed.values():
            self._writes += contents.writes(self._copies)
            self._left += contents.left()
        if self._copies or self._owners.moved(self._values):
            assigned = list(self._assigned())
            self._writes += assigned
            for slots, name, _ in assigned:
                self._left += left_in(slots, name)
        found = {slot: slot in changed for slot, *_ in self._contents}
        self._unchanged = [
            (slot, contents if expected is False else contents.without_copies())
            for slot, contents, expected in self._contents
            if not found[slot]
        ]
        self._contents = []  # they may hold much memory
        return found

    @property
    def changed(self) -> set[Slot]:
        """The attributes that the run has assigned, or whose contents it has changed."""
        assigned = {
            holder.slot(name)
            for holder, old in self._owners.attributes(self._values)
            for name, _ in _restored(holder, old, {})
        }
        return assigned.union(self._moved())

    @property
    def made(self) -> set[Slot]:
        """The attributes that were not there before the run, or None."""
        return {
            holder.slot(name)
            for holder, old in self._owners.attributes(self._values)
            for name, value in _restored(holder, old, {})
            if value is None or value is ABSENT
        }

    def _moved(self) -> dict[Slot, Contents]:
        return {
            slot: contents
            for slot, contents, expected in self._contents
            if contents.moved(compared=expected is None)
        }

    def restore(self) -> None:
        self.compare(linked=True)
        Journal().write(self._writes)

    def swapped_in(self, journal: Journal) -> list[Manager]:
        writes = self._writes
        if self._owners.moved(self._values):  # perhaps by a later run, as contents below
            writes = [*writes, *self._assigned()]
        for slot, contents in self._unchanged:
            if contents.moved(compared=False):
                _refuse_lost(slot, contents)
                writes = [*writes, *contents.writes({})]
        if not writes:
            return []
        return [Bracket(partial(journal.write, writes), partial(self._undo, journal))]

    def _assigned(self) -> Iterator[Write]:
        """Yield the old values of attributes that have changed since."""
        for holder, old in self._owners.attributes(self._values):
            for name, value in _restored(holder, old, self._copies):
                yield holder.slots, name, value

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


def _refuse_lost(slot: Slot, contents: Contents) -> None:
    """Raise RuntimeError if contents that have changed were not saved before."""
    module, name = slot
    if contents.lost:
        raise RuntimeError(
            f"{type(module).__name__} must change what its attribute {name!r} contains in every "
            "forward or in none: it did for the first time after an earlier run that did not, and "
            "the contents before are needed for recomputation. Assign a new object to the "
            "attribute instead of changing it, or write activation_checkpointing='never'. If it is "
            "a layer of another stage that changes the object, at the same time, give each layer "
            "its own."
        )
