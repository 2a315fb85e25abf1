"""What the layers of a stage may change in forward, saved for recomputation and for running again.

Buffers, frozen parameters, attributes and generators that modules hold: a recomputation must start
from those that its first forward started from, and must not change them a second time. It runs with
the saved ones, and what the first forwards left is put back by the stage's journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from lightning_gpipe.core.faithful.attributes import Before as AttributesBefore
from lightning_gpipe.core.faithful.attributes import Moved, StageAttributes
from lightning_gpipe.core.faithful.behavior import Behavior
from lightning_gpipe.core.faithful.buffers import Buffers, StageBuffers
from lightning_gpipe.core.faithful.held_generators import HeldGenerators
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.parameters import Before as ParametersBefore
from lightning_gpipe.core.faithful.parameters import EditedParameters, StageParameters
from lightning_gpipe.core.plan import Slot


class Before(NamedTuple):
    """The state of a stage before the first forward of a micro-batch."""

    buffers: Buffers
    parameters: ParametersBefore | None  # None if the layers are known not to edit any
    attributes: AttributesBefore
    generators: list[Write]


class Saved(NamedTuple):
    """What a recomputation needs of the state before its first forward."""

    buffers: Buffers
    parameters: EditedParameters | None
    attributes: Moved
    generators: list[Write]

    def swapped_in(self, journal: Journal) -> list[Manager]:
        """Give the modules the saved state for the duration of a ``with`` block.

        The list is empty if there is nothing to restore.
        """
        managers = self.buffers.swapped_in(journal)
        if self.parameters is not None:
            managers += self.parameters.swapped_in(journal)
        if self.attributes.writes:
            managers.append(self.attributes.undone(journal))
        if self.generators:
            managers.append(journal.changed(self.generators))
        return managers


class Snapshot:
    """The state of a stage before a whole forward, which may have to be run again.

    Args:
        before: The state.
        attributes: What compares and restores the attributes.
    """

    def __init__(self, before: Before, attributes: StageAttributes) -> None:
        self._before = before
        self._attributes = attributes

    @property
    def lost(self) -> Slot | None:
        """The slot of an edited buffer whose value was not saved, if there is one."""
        return self._before.buffers.lost

    def restore(self) -> None:
        """Restore the state.

        Raises:
            RuntimeError: If contents of an attribute changed that were not saved.
        """
        self._before.buffers.restore()
        if self._before.parameters is not None:
            self._before.parameters.restore()
        moved, _ = self._attributes.after(self._before.attributes, linked=True)
        Journal().write([*moved.writes, *self._before.generators])


class StageState:
    """What the modules of one stage may change in forward.

    Args:
        modules: The modules.
        deferred: Whether batch norms in training do not update their running statistics in forward.
    """

    def __init__(self, modules: Iterable[nn.Module], *, deferred: bool) -> None:
        modules = tuple(modules)
        self._buffers = StageBuffers(modules, deferred=deferred)
        self._parameters = StageParameters(modules)
        self._attributes = StageAttributes(modules)
        self._generators = HeldGenerators(modules)

    def refresh(self) -> None:
        """Prepare for a mini-batch, since which the user may have changed the modules."""
        self._generators.refresh()

    def snapshot(self, behavior: Behavior) -> Snapshot:
        """A snapshot before a run of layers with this behavior, to restore."""
        return Snapshot(self.before(behavior), self._attributes)

    def before(self, behavior: Behavior) -> Before:
        """The state before a run of layers with this behavior."""
        edited = behavior.edited_parameters
        return Before(
            self._buffers.before(behavior),
            None if edited is not None and not edited else self._parameters.before(edited),
            self._attributes.before(behavior.changed_attributes),
            self._generators.saved(),
        )

    def after(self, behavior: Behavior, before: Before) -> Saved:
        """What a recomputation of the run needs; the first run records its changes.

        Raises:
            RuntimeError: If something changed that did not before, and was not saved therefore.
        """
        self._buffers.after(behavior, before.buffers)
        moved, changed = self._attributes.after(before.attributes, linked=behavior.captures)
        if before.parameters is None:
            return Saved(before.buffers, None, moved, before.generators)
        parameters, edited = self._parameters.after(before.parameters)
        if behavior.edited_parameters is None:
            behavior.changed_attributes, behavior.edited_parameters = changed, edited
        return Saved(before.buffers, parameters, moved, before.generators)


class AttributesPreserved:
    """Restores at the end of a ``with`` block what layers keep in attributes and generators."""

    # A class: see Note [Context managers are classes].

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = tuple(modules)
        self._attributes = StageAttributes(modules)
        self._generators = HeldGenerators(modules)

    def __enter__(self) -> None:
        self._states = self._generators.saved()
        self._before = self._attributes.before(None)

    def __exit__(self, *error: object) -> None:
        moved, _ = self._attributes.after(self._before, linked=True)
        Journal().write([*moved.writes, *self._states])
