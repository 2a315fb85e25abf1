"""The changes that a run of the user's code makes on modules, by slot."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_gpipe.core.faithful.state.attributes import AttributeState, Owners
from lightning_gpipe.core.faithful.state.buffers import BufferState
from lightning_gpipe.core.faithful.state.parameters import edited, watched_by_checksums
from lightning_gpipe.core.layout import Slot


class Changes:
    """Watches modules, from when it is made.

    Args:
        owners: Those whose attributes count.
        buffers_of, parameters_of: Those whose buffers and parameters count.
        compared: Whether edits that leave no other trace, as through ``.data``, are found by the
            values before, which are copied; of parameters, by checksums.
    """

    def __init__(
        self,
        owners: Iterable[nn.Module],
        *,
        buffers_of: Iterable[nn.Module] = (),
        parameters_of: Iterable[nn.Module] = (),
        compared: bool = False,
    ) -> None:
        found = Owners(owners)
        known = {} if compared else dict.fromkeys(found.containing, False)
        self._attributes = AttributeState(found, found.values() or (), known)
        self._buffers = BufferState(list(buffers_of), edited=None if compared else ())
        self._parameters = watched_by_checksums(parameters_of) if compared else []

    @property
    def slots(self) -> set[Slot]:
        """The attributes, buffers and parameters that have changed."""
        return self._attributes.changed | self._buffers.changed | edited(self._parameters)

    @property
    def made(self) -> set[Slot]:
        """The attributes that were not there, or None, as of a cache that a first run fills."""
        return self._attributes.made
