"""The state of modules as one value: captured before a run, compared after it, restored.

Buffers, frozen parameters, attributes, and generators that modules hold: a recomputation must start
from the state that its first forward started from, and must not change it a second time. It runs
with the saved state, and the stage's journal puts back what the first forwards left.

A forward that runs again as a whole, a verification, a rehearsal and a measurement capture the
state too, and restore it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.random.random_state import RandomState
from lightning_gpipe.core.faithful.state.attributes import AttributeState, Owners
from lightning_gpipe.core.faithful.state.behavior import Behavior
from lightning_gpipe.core.faithful.state.buffers import BufferState
from lightning_gpipe.core.faithful.state.module_generators import ModuleGenerators
from lightning_gpipe.core.faithful.state.parameters import ParameterState


class ModuleState(NamedTuple):
    """The state of some modules before a run."""

    buffers: BufferState
    parameters: ParameterState | None  # None if they are not restored, or known not to be edited
    attributes: AttributeState
    generators: RandomState | None  # None without any

    @classmethod
    def capture(
        cls,
        modules: Iterable[nn.Module],
        *,
        parameters: bool = False,
        buffers_of: Iterable[nn.Module] | None = None,
    ) -> ModuleState:
        """Capture the whole state of some modules, with frozen parameters if asked.

        The buffers are those of ``buffers_of``, if these are other modules.
        """
        modules = tuple(modules)
        owners = Owners(modules)
        return cls(
            BufferState(modules if buffers_of is None else tuple(buffers_of)),
            ParameterState(modules, None) if parameters else None,
            AttributeState(owners, owners.values() or (), None),
            ModuleGenerators(modules).capture(),
        )

    def compare(self, behavior: Behavior) -> None:
        """Keep what a run has changed, for its recomputation; the first run records it.

        Raises:
            RuntimeError: If something changed that earlier runs did not change, and is not saved.
        """
        self.buffers.compare(behavior)
        changed = self.attributes.compare(linked=behavior.captures)
        if self.parameters is not None:
            edited = self.parameters.compare()
            if behavior.edited_parameters is None:
                behavior.changed_attributes, behavior.edited_parameters = changed, edited

    def restore(self) -> None:
        """Restore the state after a run, instead of a comparison; raise if something is lost."""
        self.buffers.restore()
        if self.parameters is not None:
            self.parameters.restore()
        self.attributes.restore()
        if self.generators is not None:
            self.generators.restore()

    def swapped_in(self, journal: Journal) -> list[Manager]:
        """Return the context managers in which a recomputation starts from this state."""
        managers = self.buffers.swapped_in(journal)
        if self.parameters is not None:
            managers += self.parameters.swapped_in(journal)
        managers += self.attributes.swapped_in(journal)
        if self.generators is not None:
            managers.append(journal.changed(self.generators.writes()))
        return managers


class StageState:
    """Captures the state of one stage's modules, as far as their layers are known to change it.

    ``deferred``: batch norms in training do not update their running statistics in forward.
    """

    def __init__(self, modules: Iterable[nn.Module], *, deferred: bool) -> None:
        self._modules = tuple(modules)
        self._deferred = deferred
        self._owners = Owners(())
        self._generators = ModuleGenerators(self._modules)

    def refresh(self) -> None:
        """Prepare for a mini-batch, since which the user may have changed the modules."""
        self._generators.refresh()

    def capture(self, behavior: Behavior) -> ModuleState:
        """Capture the state before a run of layers with this behavior."""
        changed, edited = behavior.changed_attributes, behavior.edited_parameters
        values = None if changed is None else self._owners.values()
        if values is None or not self._owners.holders:
            self._owners = Owners(self._modules)
            values = self._owners.values() or ()
        return ModuleState(
            BufferState(self._modules, edited=behavior.edited_buffers, deferred=self._deferred),
            None if edited is not None and not edited else ParameterState(self._modules, edited),
            AttributeState(self._owners, values, changed),
            self._generators.capture(),
        )

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        # A copied module has other attributes and generators.
        return partial(StageState, deferred=self._deferred), (self._modules,)
