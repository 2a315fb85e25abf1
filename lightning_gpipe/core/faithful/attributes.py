"""Saves what layers keep in Python attributes, so that a recomputation starts from the same.

The attributes are those of modules, of objects that they hold, and of parameters: quantised weights
have their scales there, and some hand them over to the module in the first forward.

``self.steps += 1``, ``self.cache = y``: a layer that reads what an earlier forward left computes
something else when it is run again, and changes it a second time. So the recomputation of a
micro-batch gets the attributes from before its first forward, and after it they are what the first
forwards left.

Attributes are compared by identity before and after each first forward that is recomputed, at well
under a microsecond per module. What lists, dicts and tensors contain is compared as far as it was
copied, see :mod:`~lightning_gpipe.core.faithful.contents`.

A tensor that the first forward left may have been kept for its gradient, which flows through the
graph of the recomputation. So the one that the recomputation leaves in its place takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_gpipe.core.faithful.contents import Contents, Left, has_contents, left_in
from lightning_gpipe.core.faithful.journal import ABSENT, Journal, Write, value_in
from lightning_gpipe.core.plan import Holder, Slot, holders, parameter_holders

Values = Sequence[Sequence[Any]]  # of all attributes, holder by holder


class Moved(NamedTuple):
    """What moved in a first forward.

    Attributes:
        writes: What restores it.
        left: The tensors with a graph that were left instead.
    """

    writes: Sequence[Write]
    left: Sequence[Left]

    def undone(self, journal: Journal) -> Undone:
        """Restore it for the duration of a ``with`` block that runs the forward again."""
        return Undone(self, journal)


_NOTHING, _NO_SLOTS = Moved((), ()), frozenset[Slot]()


class _Held(NamedTuple):
    """One attribute with contents."""

    slot: Slot
    contents: Contents
    known: bool  # to be changed by every run


class Before(NamedTuple):
    """The attributes of one stage's modules before a run."""

    owners: Owners
    values: Values
    held: Sequence[_Held]
    first: bool


class Owners:
    """The modules of a stage, their objects and parameters, as they are at one time."""

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
        """The present values of all attributes; None if some were added or removed."""
        if sum(map(len, self._slots)) != self._size:  # one added and one removed: KeyError
            return None
        try:
            return [get(slots) for get, slots in self._getters]
        except KeyError:
            return None

    def moved(self, before: Values) -> bool:
        """Whether any attribute is another object than before."""
        present = self.values()
        return present is None or not all(map(is_, _flat(before), _flat(present)))

    def attributes(self, values: Values) -> Iterator[tuple[Holder, dict[str, Any]]]:
        """Each holder with its attributes of that time."""
        found = iter(values)
        for holder, names in zip(self.holders, self.names, strict=True):
            yield holder, dict(zip(names, next(found), strict=False)) if names else {}


class StageAttributes:
    """The attributes of one stage's modules, and of the objects that they hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._owners = Owners(())

    def before(self, changed: frozenset[Slot] | None) -> Before:
        """A snapshot before a run.

        Args:
            changed: The attributes whose contents the first run changed; None if this is the first.
        """
        first = changed is None
        values = None if first else self._owners.values()
        if values is None or not self._owners.holders:
            self._owners = Owners(self._modules)
            values = self._owners.values() or ()
        if not self._owners.containing:
            return Before(self._owners, values, (), first)
        held = []
        for holder, name in self._owners.containing:
            slot = holder.module, holder.prefix + name
            known = changed is not None and slot in changed
            contents = Contents(holder.slots[name], copied=first or known)
            held.append(_Held(slot, contents, known))
        return Before(self._owners, values, held, first)

    def after(self, before: Before, *, linked: bool) -> tuple[Moved, frozenset[Slot]]:
        """What moved since ``before``, and the attributes whose contents changed.

        Args:
            before: What was saved.
            linked: Whether layers use tensors that they found there, and their gradients.

        Raises:
            RuntimeError: If contents changed that were not saved, because earlier runs did not
                change them.
        """
        owners, values, held, first = before
        if not (held or owners.moved(values)):
            return _NOTHING, _NO_SLOTS
        changed = [each for each in held if each.known or each.contents.moved(compared=first)]
        for each in changed:
            if each.contents.lost:
                raise RuntimeError(_lost(each.slot))
        writes: list[Write] = []
        left: list[Left] = []
        edited = {
            key: value
            for each in changed
            for key, value in each.contents.values(_titled(each.slot), linked=linked)
        }
        for each in changed:
            writes += each.contents.writes(edited)
            left += each.contents.left()
        if edited or owners.moved(values):
            for holder, old in owners.attributes(values):
                for write in _restoring(holder, old, edited):
                    writes.append(write)
                    left += left_in(holder.slots, write[1])
        return Moved(writes, left), frozenset(each.slot for each in changed)

    def __reduce__(self) -> tuple[type[StageAttributes], tuple[Any]]:
        return StageAttributes, (self._modules,)  # a copied module has other attributes


_flat = chain.from_iterable


class Undone:
    """Restores what moved for the duration of a ``with`` block, which runs the forward again."""

    # A class: see Note [Context managers are classes].

    def __init__(self, moved: Moved, journal: Journal) -> None:
        self._left = moved.left
        self._changed = journal.changed(moved.writes)

    def __enter__(self) -> None:
        self._changed.__enter__()

    def __exit__(self, *error: object) -> None:
        again = [value_in(slots, name) for slots, name, _ in self._left]
        self._changed.__exit__(*error)
        for (slots, name, first), tensor in zip(self._left, again, strict=True):
            if isinstance(tensor, Tensor) and value_in(slots, name) is first():
                slots[name] = tensor


def _restoring(
    holder: Holder, old: Mapping[str, Any], values: Mapping[int, Tensor]
) -> Iterator[Write]:
    """Give the holder its old attributes, with ``values`` instead of tensors that were edited."""
    for name, value in old.items():
        if holder.slots.get(name, ABSENT) is not value or id(value) in values:
            yield holder.slots, name, values.get(id(value), value)
    yield from ((holder.slots, name, ABSENT) for name in holder.held if name not in old)


def _titled(slot: Slot) -> str:
    module, name = slot
    return f"the attribute {name!r} of {type(module).__name__}"


def _lost(slot: Slot) -> str:
    module, name = slot
    return (
        f"{type(module).__name__} must change what its attribute {name!r} contains in every "
        "forward or in none: it did for the first time after an earlier run that did not, and the "
        "contents before are needed for recomputation. Assign a new object to the attribute "
        "instead of changing it, or write activation_checkpointing='never'. If it is a layer of "
        "another stage that changes the object, at the same time, give each layer its own."
    )
