"""Saves buffers that layers update, so that a recomputation starts from the same ones.

The power iteration of a spectral norm, a moving average, a counter: a layer that updates such a
buffer in every forward computes something else when it is run again. A recomputation must start
from the buffers that the first forward started from, and must not update them a second time.

Buffers are saved by reference, which is enough for a layer that assigns a new tensor, and by value
if a layer may edit them in place. Large buffers, such as masks, are seldom edited: their values are
copied in the first run, and in later runs only if the first run edited them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_gpipe.core.data import bytes_of, copy_values, equal
from lightning_gpipe.core.faithful.behavior import Behavior
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.values import same_value, version_of
from lightning_gpipe.core.plan import Slot

_Buffers = dict[nn.Module, dict[str, Tensor | None]]

_LARGE = 2**20  # bytes


class Buffers:
    """A snapshot of the buffers of some modules.

    Args:
        modules: The modules.
        copied: Whether to save the value of the buffer in a slot, if it is large.
        ignored: Whether to ignore edits of the buffer in a slot.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        copied: Callable[[Slot], bool],
        ignored: Callable[[Slot], bool] = lambda slot: False,
    ) -> None:
        self._modules = tuple(modules)
        self._saved = _buffers_of(self._modules)
        self._values: dict[Tensor, Tensor] = {}
        self._versions: dict[Slot, tuple[Tensor, int]] = {}
        for module, buffers in self._saved.items():
            for name, buffer in buffers.items():
                if buffer is None or ignored((module, name)):
                    continue
                self._versions[module, name] = buffer, version_of(buffer)
                small = bytes_of(buffer) <= _LARGE or buffer.is_inference()
                if small or copied((module, name)):
                    self._values[buffer] = buffer.clone()

    @property
    def edited(self) -> set[Slot]:
        """The slots whose buffers were edited since the snapshot."""
        return {
            slot
            for slot, (buffer, version) in self._versions.items()
            if version_of(buffer) != version
        }

    @property
    def moved(self) -> set[Slot]:
        """The slots whose buffers were edited, or have another value; slow."""
        return {
            slot
            for slot, (buffer, version) in self._versions.items()
            if version_of(buffer) != version
            or (buffer in self._values and not same_value(buffer, self._values[buffer]))
        }

    @property
    def lost(self) -> Slot | None:
        """The slot of an edited buffer whose value was not saved, if there is one."""
        if not self._versions:
            return None
        unsaved = (slot for slot in self.edited if self._versions[slot][0] not in self._values)
        return next(unsaved, None)

    def restore(self) -> None:
        """Restore the buffers and their values."""
        for module in self._modules:
            _set_buffers(module, self._saved.get(module, {}))
        for buffer, value in self._values.items():
            if not equal(buffer, value):  # a graph may have saved an equal one
                copy_values(buffer, value)

    def swapped_in(self, journal: Journal) -> list[Manager]:
        """Give the modules the saved buffers for the duration of a ``with`` block.

        Layers update the saved values, not the buffers themselves, which a graph may have saved.
        The list is empty if the modules have no buffers and had none.
        """
        writes = list(self._swaps())
        return [journal.changed(writes)] if writes else []

    def _swaps(self) -> Iterator[Write]:
        for module in self._modules:
            saved = self._saved.get(module, {})
            if not (saved or module._buffers):
                continue
            swap = {n: b if b is None else self._values.get(b, b) for n, b in saved.items()}
            if isinstance(module._buffers, dict):
                # The whole dict: a layer that registers a buffer adds it to this one.
                yield vars(module), "_buffers", swap
            else:  # a scripted module has a fixed set of buffers, kept in C++
                yield from ((module._buffers, name, buffer) for name, buffer in swap.items())


class StageBuffers:
    """The buffers of one stage's modules.

    Args:
        modules: The modules.
        deferred: Whether batch norms in training do not update their running statistics in forward.
    """

    def __init__(self, modules: Iterable[nn.Module], *, deferred: bool) -> None:
        self._modules = tuple(modules)
        self._deferred = deferred
        self._none: Buffers | None = None  # the snapshot while there are none

    def all(self) -> Buffers:
        """A snapshot of all buffers and their values."""
        return Buffers(self._modules, copied=lambda slot: True)

    def known(self, edited: Collection[Slot]) -> Buffers:
        """A snapshot with the values of those that are small, or are known to be edited."""
        return Buffers(
            self._modules,
            copied=lambda slot: slot in edited or self._uncounted(slot),
            ignored=lambda slot: slot not in edited and self._deferred_in(slot),
        )

    def before(self, behavior: Behavior) -> Buffers:
        """A snapshot before a run of layers with this behavior."""
        edited = behavior.edited_buffers
        for module in self._modules:
            if module._buffers:
                return self.all() if edited is None else self.known(edited)
        if self._none is None:
            self._none = self.all()
        return self._none

    def after(self, behavior: Behavior, buffers: Buffers) -> None:
        """Record which buffers the layers edited, after their first run.

        Raises:
            RuntimeError: If they edited one that they did not edit before.
        """
        if buffers is self._none and behavior.edited_buffers is not None:
            return  # there were none that they could edit
        if buffers.lost is not None:
            module, name = buffers.lost
            raise RuntimeError(
                f"{type(module).__name__} must edit its buffer {name!r} in every forward or in "
                "none: it did for the first time after an earlier run that did not, and the value "
                "before is needed for recomputation. Assign a new tensor to the buffer instead of "
                "editing it, or write activation_checkpointing='never'."
            )
        if behavior.edited_buffers is None:
            behavior.edited_buffers = buffers.moved

    def _uncounted(self, slot: Slot) -> bool:
        """Whether edits do not increment the version counter, as those of running statistics."""
        return isinstance(slot[0], _NormBase)

    def _deferred_in(self, slot: Slot) -> bool:
        """Whether the update of the buffer is deferred, so that a batch norm does not edit it.

        What is around the batch norm may, by a call of F.batch_norm, as the first run shows.
        """
        module = slot[0]
        deferred = self._deferred and isinstance(module, (_BatchNorm, _InstanceNorm))
        return deferred and module.training


def _buffers_of(modules: Iterable[nn.Module]) -> _Buffers:
    """The buffers of each module that has any."""
    return {module: dict(module._buffers) for module in modules if module._buffers}


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Give ``module`` these buffers, and no others."""
    slots = module._buffers
    if isinstance(slots, dict):  # a scripted module has a fixed set, kept in C++
        for name in [name for name in slots if name not in buffers]:
            del slots[name]
    for name, buffer in buffers.items():
        slots[name] = buffer
