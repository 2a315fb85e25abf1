"""The state of modules as one value: captured before a run, compared after it, restored.

A recomputation must start from the buffers, frozen parameters, attributes and generators that its
first forward started from, and must not change them a second time. It runs with the saved state,
and the stage's journal puts back what the first forwards left.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.random.random_state import ForeignGenerator, RandomState
from lightning_gpipe.core.faithful.state.attributes import AttributeState, Owners, Values
from lightning_gpipe.core.faithful.state.behavior import Behavior, record
from lightning_gpipe.core.faithful.state.buffers import BufferState
from lightning_gpipe.core.faithful.state.parameters import ParameterState
from lightning_gpipe.core.layout import Slot, is_generator, within

_PLAIN = (int, float, str, bytes, type(None), Tensor)  # without a generator


class ModuleState(NamedTuple):
    """The state of some modules before a run."""

    buffers: BufferState
    parameters: ParameterState | None  # None if they are not restored, or known not to be edited
    attributes: AttributeState
    generators: RandomState | None  # None without any

    @staticmethod
    def capture(modules: Iterable[nn.Module], *, parameters: bool = False) -> ModuleState:
        behavior = Behavior(edited_parameters=None if parameters else frozenset())
        return StageState(modules, deferred=False).capture(behavior)

    def compare(self, behavior: Behavior) -> None:
        """Keep what a run has changed, for its recomputation; raise if earlier runs did not."""
        self.buffers.compare(behavior)
        changed = self.attributes.compare(linked=behavior.captures)
        if changed:
            behavior.changed_attributes = {**changed, **behavior.changed_attributes}
        if self.parameters is not None:
            edited = self.parameters.compare()
            if behavior.edited_parameters is None:
                behavior.edited_parameters = edited

    def restore(self) -> None:
        """Restore the state after a run, instead of a comparison; raise if something is lost."""
        self.buffers.restore()
        if self.parameters is not None:
            self.parameters.restore()
        self.attributes.restore()
        if self.generators is not None:
            self.generators.restore()

    def swapped_in(self, journal: Journal) -> list[Manager]:
        managers = self.buffers.swapped_in(journal)
        if self.parameters is not None:
            managers += self.parameters.swapped_in(journal)
        managers += self.attributes.swapped_in(journal)
        if self.generators is not None:
            managers.append(journal.changed(self.generators.writes()))
        return managers


class StageState:
    """Captures the state of one stage's modules, as far as their layers are known to change it.

    Generators that modules hold are searched for again when a module has another object in an
    attribute. Only the worker of the stage draws from them, so their states are saved before each
    first forward. ``deferred``: see :class:`BufferState`.
    """

    def __init__(self, modules: Iterable[nn.Module], *, deferred: bool) -> None:
        self._modules = tuple(modules)
        self._deferred = deferred
        self._owners = self._searched = Owners(())
        self._searched_values: Values | None = None
        self._generators: list[Generator | ForeignGenerator] | None = None  # not searched for yet
        self._behaviors: dict[Hashable, Behavior] = {}
        self._latest: tuple[bytes, Hashable, Behavior] | None = None

    def behavior(self, flags: bytes, structure: Hashable) -> Behavior:
        latest = self._latest  # to hash a structure takes longer than to see that it is the same
        if latest is not None and latest[0] == flags and latest[1] == structure:
            return latest[2]
        signature = flags, structure
        behavior = self._behaviors.get(signature) or Behavior()
        record(self._behaviors, signature, behavior)
        self._latest = flags, structure, behavior
        return behavior

    @property
    def edited_parameters(self) -> frozenset[Slot]:
        """The slots of the frozen parameters that the layers edit for any call signature."""
        recorded = self._behaviors.values()
        return frozenset().union(*[b.edited_parameters or () for b in recorded])

    def snapshot(self, *, first: bool) -> ModuleState:
        """Capture the state before another forward; ``first``: the behavior is not known yet."""
        union, recorded = Behavior(), self._behaviors.values()
        if not first:
            union.edited_buffers = set().union(*[b.edited_buffers or () for b in recorded])
            union.edited_parameters = self.edited_parameters
            known = union.changed_attributes = dict.fromkeys(self._owners.containing, False)
            for each in recorded:
                known |= {slot: True for slot, x in each.changed_attributes.items() if x}
        return self.capture(union)

    def refresh(self) -> None:
        """Prepare for a mini-batch, since which the user may have changed the modules."""
        before = self._searched_values
        if before is not None and not self._searched.moved(before):
            return  # most often, and seen at once
        present = self._searched.values()
        if before is None or present is None or _other_objects(present, before):
            self._generators = None

    def capture(self, behavior: Behavior) -> ModuleState:
        edited = behavior.edited_parameters
        values = None if edited is None else self._owners.values()
        if values is None or not self._owners.holders:
            self._owners, self._generators = Owners(self._modules), None
            values = self._owners.values() or ()
        if self._generators is None:
            self._searched, self._searched_values = self._owners, values
            by_id = {
                id(each): each
                for holder in self._searched.holders
                for value in holder.held.values()
                for each in within(value)
                if is_generator(each)
            }
            self._generators = [ForeignGenerator.of(each) for each in by_id.values()]
        return ModuleState(
            BufferState(self._modules, edited=behavior.edited_buffers, deferred=self._deferred),
            None if edited is not None and not edited else ParameterState(self._modules, edited),
            AttributeState(self._owners, values, behavior.changed_attributes),
            RandomState.of(self._generators) if self._generators else None,
        )


def _other_objects(new: Values, old: Values) -> bool:
    pairs = zip(chain(*new), chain(*old), strict=True)
    return any(one is not other and not isinstance(one, _PLAIN) for one, other in pairs)


@contextmanager
def preserved(
    modules: Iterable[nn.Module], devices: Iterable[torch.device], *, parameters: bool = False
) -> Iterator[None]:
    """Restore at the end of a ``with`` block what running modules on ``devices`` has changed.

    These are buffers, the generators of PyTorch, NumPy and Python, what modules keep in attributes
    and generators, and frozen ``parameters`` if asked. Other changes are not undone.
    """
    random_state = RandomState.capture(devices)
    state = ModuleState.capture(modules, parameters=parameters)
    try:
        yield
    finally:
        random_state.restore()
        state.restore()
        torch.clear_autocast_cache()  # its copies of weights belong to a graph that was freed
