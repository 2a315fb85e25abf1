"""Parameters that layers edit in forward, which a recomputation would edit again.

The key encoder of MoCo and BYOL is frozen, and forward moves it towards the one that is trained. A
recomputation edits a copy of its value from before the first forward. The first run copies all
frozen parameters, up to a limit; later runs copy those that it edited.

A trained parameter cannot be replaced by a copy, which would get the gradient. It may be edited if
a second edit changes nothing, as ``nn.Embedding(max_norm=...)`` does. The first recomputation
checks that by checksums: copies would take too much memory, and edits through
``.data`` leave no other trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gpipe.core.data import bytes_of, checksum, copy_values, equal
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.parameter_leaves import has_memory, leaf_like, value_on
from lightning_gpipe.core.faithful.state.behavior import version_of
from lightning_gpipe.core.layout import Slot

_MOST = 2**30  # bytes of parameters to copy in the first run


class _WatchedParameter:
    """A parameter as it was, by a copy or a checksum."""

    def __init__(self, slot: Slot, parameter: nn.Parameter, *, copied: bool) -> None:
        self.slot = slot
        self.parameter = parameter
        value = value_on(parameter, parameter.device) if copied else None
        self.copy = None if value is None else leaf_like(parameter, False, value)
        self._version = version_of(parameter)
        self._pointer = parameter.data_ptr()
        self._checksum = None if copied else checksum(parameter)

    @property
    def moved(self) -> bool:
        """True if it has another value."""
        if self._checksum is not None:
            return not torch.equal(checksum(self.parameter), self._checksum)
        return self.copy is not None and not equal(self.parameter, self.copy)

    @property
    def edited(self) -> bool:
        """True if anything wrote to it, or replaced its data."""
        if version_of(self.parameter) != self._version:
            return True
        return self.parameter.data_ptr() != self._pointer or self.moved


class ParameterState:
    """The parameters of some modules before a run; once compared, those that it edited.

    ``edited`` are the frozen parameters that the first run edited; None if this is the first.
    """

    def __init__(self, modules: Iterable[nn.Module], edited: frozenset[Slot] | None) -> None:
        self._first = edited is None
        self._watched = _all(modules) if edited is None else _watched(edited, copied=True)
        self._writes: list[Write] = []
        self._trained: list[Slot] = []

    def compare(self) -> frozenset[Slot]:
        """Return the slots of the frozen parameters that the run edited; raise if one is lost."""
        edited = [watched for watched in self._watched if not self._first or watched.edited]
        frozen = [watched for watched in edited if not watched.parameter.requires_grad]
        for watched in frozen:
            if watched.copy is None:
                raise RuntimeError(_too_large(watched.slot))
        self._writes = [
            (module._parameters, name, w.copy) for w in frozen for module, name in [w.slot]
        ]
        self._trained = [w.slot for w in edited if w.parameter.requires_grad]
        self._watched = []  # the copies of the others
        return frozenset(watched.slot for watched in frozen)

    def restore(self) -> None:
        """Restore the values of frozen parameters, as far as they were copied."""
        for watched in self._watched:
            if watched.copy is not None and watched.edited:
                copy_values(watched.parameter, watched.copy)

    def swapped_in(self, journal: Journal) -> Iterator[Manager]:
        """Give a recomputation copies of the frozen ones, and check that it leaves the others."""
        if self._writes:
            yield journal.changed(self._writes)
        if self._trained:
            yield _SecondEditCheck(self._trained)


class _SecondEditCheck:
    """Raises at the end of a ``with`` block if it changed parameters that are trained."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = slots

    def __enter__(self) -> None:
        self._watched = _watched(self._slots, copied=False)

    def __exit__(self, kind: object, *error: object) -> None:
        again = next((watched.slot for watched in self._watched if watched.moved), None)
        if kind is None and again is not None:
            module, name = again
            raise RuntimeError(
                f"{type(module).__name__} must not edit its parameter {name!r} in a forward that "
                "is recomputed, unless to edit it again changes nothing: the recomputation changed "
                "what the first forward had left. Edit it after the optimizer step, make it a "
                "buffer if it is not trained, or write activation_checkpointing='never'."
            )


def edited(watched: Iterable[_WatchedParameter]) -> set[Slot]:
    """Return the slots of those that were edited since they are watched."""
    return {each.slot for each in watched if each.edited}


def watched_by_checksums(modules: Iterable[nn.Module]) -> list[_WatchedParameter]:
    """Watch all parameters without copies."""
    return [_WatchedParameter(slot, p, copied=False) for slot, p in _slots_of(modules)]


@contextmanager
def parameters_preserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore all parameters at the end of a ``with`` block; raise if one is too large to copy.

    One that has memory elsewhere gets its own again.
    """
    watched = _all(modules, trained=True)
    data = [each.parameter.data for each in watched]
    try:
        yield
    finally:
        for each, own in zip(watched, data, strict=True):
            if each.parameter.data_ptr() != own.data_ptr():
                each.parameter.data = own
            if each.copy is not None and each.moved:
                copy_values(each.parameter, each.copy)
    for each in watched:
        if each.copy is None and each.moved:
            module, name = each.slot
            raise RuntimeError(
                "a call that shows what layers cost must not edit parameters that are too large to "
                f"copy and restore: got an edit of {name!r} of {type(module).__name__}, in a model "
                f"with more than {_MOST >> 30} GiB of parameters. Edit it after the optimizer "
                "step, or write a balance as a list."
            )


def _all(modules: Iterable[nn.Module], *, trained: bool = False) -> list[_WatchedParameter]:
    """Watch all parameters, frozen or also ``trained`` ones by copies as far as the limit goes."""
    budget, watched = _MOST, []
    for slot, parameter in _slots_of(modules):
        copied = (trained or not parameter.requires_grad) and bytes_of(parameter) <= budget
        budget -= bytes_of(parameter) if copied else 0
        watched.append(_WatchedParameter(slot, parameter, copied=copied))
    return watched


def _slots_of(modules: Iterable[nn.Module]) -> Iterator[tuple[Slot, nn.Parameter]]:
    for module in modules:
        for name, parameter in module._parameters.items():
            if not (parameter is None or parameter.is_meta) and has_memory(parameter):
                yield (module, name), parameter


def _watched(slots: Iterable[Slot], *, copied: bool) -> list[_WatchedParameter]:
    parameters = ((slot, slot[0]._parameters.get(slot[1])) for slot in slots)
    return [_WatchedParameter(slot, p, copied=copied) for slot, p in parameters if p is not None]


def _too_large(slot: Slot) -> str:
    module, name = slot
    return (
        f"{type(module).__name__} must not edit its frozen parameter {name!r} in forward: the "
        f"frozen parameters of its stage have more than {_MOST >> 30} GiB, too much to copy for "
        "the recomputation of the first micro-batch. Make those that forward edits buffers, or "
        "write activation_checkpointing='never'."
    )
