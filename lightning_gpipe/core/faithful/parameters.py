"""Parameters that layers edit in forward, which a recomputation would edit again.

The key encoder of MoCo and BYOL is frozen, and forward moves it towards the one that is trained. So
it is a buffer in all but name: a recomputation gets a copy of its value from before the first
forward, and edits that. All frozen parameters are copied in the first run, up to a limit; in later
runs those that the first run edited.

A parameter that is trained cannot be replaced by a copy, whose gradient is another one's. It may be
edited if a second edit changes nothing, as clamping and ``nn.Embedding(max_norm=...)`` do. That is
checked in the first recomputation, by sums over the elements: to copy all parameters would take too
much memory, and edits through ``.data`` have no other trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import bytes_of, copy_values
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.shadow import leaf_like
from lightning_gpipe.core.faithful.values import same_value, version_of
from lightning_gpipe.core.plan import Slot

_MOST = 2**30  # bytes of frozen parameters to copy in the first run


class _Watched:
    """A parameter as it was, by a copy or by sums over its elements."""

    def __init__(self, slot: Slot, parameter: nn.Parameter, *, copied: bool) -> None:
        self.slot = slot
        self.parameter = parameter
        self.copy = leaf_like(parameter, False, parameter.device) if copied else None
        self._version = version_of(parameter)
        self._pointer = parameter.data_ptr()
        self._sums = None if copied else _sums(parameter)

    @property
    def moved(self) -> bool:
        """Whether it has another value."""
        if self._sums is not None:
            return not torch.equal(_sums(self.parameter), self._sums)
        return self.copy is not None and not same_value(self.parameter, self.copy)

    @property
    def edited(self) -> bool:
        """Whether anything wrote to it, or replaced its data."""
        if version_of(self.parameter) != self._version:
            return True
        return self.parameter.data_ptr() != self._pointer or self.moved


class Before(NamedTuple):
    """The parameters of one stage's modules before a run, as far as they are watched."""

    watched: list[_Watched]
    first: bool

    def restore(self) -> None:
        """Restore the values of frozen parameters, as far as they were copied."""
        for each in self.watched:
            if each.copy is not None and each.edited:
                copy_values(each.parameter, each.copy)


class EditedParameters(NamedTuple):
    """The parameters that a run edited.

    Attributes:
        writes: What gives a recomputation the frozen ones.
        trained: The slots of the others.
    """

    writes: list[Write]
    trained: list[Slot]

    def swapped_in(self, journal: Journal) -> Iterator[Manager]:
        """Prepare a recomputation: it gets copies, or must not change anything."""
        if self.writes:
            yield journal.changed(self.writes)
        if self.trained:
            yield _NotAgain(self.trained)


class StageParameters:
    """The parameters of one stage's modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)

    def before(self, edited: frozenset[Slot] | None) -> Before:
        """Watch parameters before a run.

        Args:
            edited: The frozen ones that the first run edited; None if this is the first.
        """
        if edited is None:
            return Before(list(_all(self._modules)), first=True)
        slots = [(slot, slot[0]._parameters.get(slot[1])) for slot in edited]
        found = [_Watched(slot, each, copied=True) for slot, each in slots if each is not None]
        return Before(found, first=False)

    def after(self, before: Before) -> tuple[EditedParameters, frozenset[Slot]]:
        """What a run edited, and the slots of the frozen parameters among that.

        Raises:
            RuntimeError: If it edited a frozen parameter that was too large to copy.
        """
        edited = [each for each in before.watched if not before.first or each.edited]
        frozen = [each for each in edited if not each.parameter.requires_grad]
        for each in frozen:
            if each.copy is None:
                raise RuntimeError(_too_large(each.slot))
        writes: list[Write] = [
            (each.slot[0]._parameters, each.slot[1], each.copy) for each in frozen
        ]
        trained = [each.slot for each in edited if each.parameter.requires_grad]
        return EditedParameters(writes, trained), frozenset(each.slot for each in frozen)


class _NotAgain:
    """Raises at the end of a ``with`` block if it changed parameters that are trained."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = slots

    def __enter__(self) -> None:
        found = ((slot, slot[0]._parameters.get(slot[1])) for slot in self._slots)
        self._watched = [_Watched(slot, p, copied=False) for slot, p in found if p is not None]

    def __exit__(self, kind: object, *error: object) -> None:
        again = next((each.slot for each in self._watched if each.moved), None)
        if kind is None and again is not None:
            module, name = again
            raise RuntimeError(
                f"{type(module).__name__} must not edit its parameter {name!r} in a forward that "
                "is recomputed, unless to edit it again changes nothing: the recomputation changed "
                "what the first forward had left. Edit it after the optimizer step, make it a "
                "buffer if it is not trained, or write activation_checkpointing='never'."
            )


def _all(modules: Iterable[nn.Module]) -> Iterator[_Watched]:
    """Watch all parameters, frozen ones by copies as far as the limit goes."""
    budget = _MOST
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_plain(parameter):
                continue
            copied = not parameter.requires_grad and bytes_of(parameter) <= budget
            budget -= bytes_of(parameter) if copied else 0
            yield _Watched((module, name), parameter, copied=copied)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether its elements can be read as those of any dense tensor."""
    own = type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__
    return own and parameter.layout is torch.strided and not parameter.is_meta


@torch.no_grad()
def _sums(parameter: Tensor) -> Tensor:
    """Sums over the elements and their squares: equal as long as nothing is edited."""
    value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    sums = [value.sum(dtype=torch.float64)]
    if value.is_floating_point():
        sums.append(torch.linalg.vector_norm(value, dtype=torch.float64))
    return torch.stack(sums).nan_to_num()


def _too_large(slot: Slot) -> str:
    module, name = slot
    return (
        f"{type(module).__name__} must not edit its frozen parameter {name!r} in forward: the "
        f"frozen parameters of its stage have more than {_MOST >> 30} GiB, too much to copy for "
        "the recomputation of the first micro-batch. Make those that forward edits buffers, or "
        "write activation_checkpointing='never'."
    )
