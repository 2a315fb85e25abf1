"""Buffers that layers update in forward, such as moving averages and counters.

They are saved by reference, for layers that assign a new tensor, and by value if a layer may edit
them in place: large ones, such as masks, in the first run, and then only if that edited them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_gpipe.core.data import bytes_of, copy_values, equal
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.layers.batchnorm import Norm
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.state.behavior import Behavior, version_of
from lightning_gpipe.core.layout import Slot

_LARGE = 2**20  # bytes


class BufferState:
    """The buffers of some modules before a run.

    ``edited`` are the slots of those that layers are known to edit, None to copy all values;
    ``deferred``: batch norms in training do not update their running statistics in forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        edited: Collection[Slot] | None = None,
        deferred: bool = False,
    ) -> None:
        self._modules = modules
        self._buffers: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._values: dict[Tensor, Tensor] = {}
        self._versions: dict[Slot, tuple[Tensor, int]] = {}
        for module in modules:
            if not module._buffers:
                continue
            self._buffers[module] = buffers = dict(module._buffers)
            for name, buffer in buffers.items():
                expected = edited is None or (module, name) in edited
                # Code around a batch norm may edit its statistics, as the first run shows.
                defers = deferred and isinstance(module, Norm) and module.training
                if buffer is None or (defers and not expected):
                    continue
                self._versions[module, name] = buffer, version_of(buffer)
                # Running statistics are edited without an increment of the version counter.
                copied = expected or isinstance(module, _NormBase)
                if copied or bytes_of(buffer) <= _LARGE or buffer.is_inference():
                    self._values[buffer] = buffer.clone()

    @property
    def lost(self) -> Slot | None:
        """The slot of an edited buffer whose value was not saved, if there is one."""
        for slot, (buffer, version) in self._versions.items():
            if buffer not in self._values and version_of(buffer) != version:
                return slot
        return None

    def compare(self, behavior: Behavior) -> None:
        """Record the buffers that the first run edited; raise for one that was not saved."""
        if self._versions:
            self._check_saved()
        if behavior.edited_buffers is None:
            behavior.edited_buffers = self._edited

    @property
    def _edited(self) -> set[Slot]:
        return {
            slot
            for slot, (buffer, version) in self._versions.items()
            if version_of(buffer) != version
            or (buffer in self._values and not equal(buffer, self._values[buffer]))
        }

    @property
    def changed(self) -> set[Slot]:
        assigned = {
            (module, name)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not self._buffers.get(module, {}).get(name)
        }
        return self._edited | assigned

    def restore(self) -> None:
        """Restore the buffers and their values; raise if one was edited that was not saved."""
        self._check_saved()
        for module in self._modules:
            slots, buffers = module._buffers, self._buffers.get(module, {})
            if isinstance(slots, dict):  # a scripted module has a fixed set, kept in C++
                for name in slots.keys() - buffers.keys():
                    del slots[name]
            for name, buffer in buffers.items():
                slots[name] = buffer
        for buffer, value in self._values.items():
            if not equal(buffer, value):  # a graph may have saved an equal one
                copy_values(buffer, value)

    def swapped_in(self, journal: Journal) -> list[Manager]:
        """Give the modules the saved buffers for the duration of a ``with`` block.

        Layers update the saved values, not the buffers themselves, which a graph may have saved.
        Raises RuntimeError if a later run has edited one that was not saved.
        """
        if self._versions:
            self._check_saved()
        writes: list[Write] = []
        for module in self._modules:
            buffers = self._buffers.get(module, {})
            if not (buffers or module._buffers):
                continue
            swap = {n: b if b is None else self._values.get(b, b) for n, b in buffers.items()}
            if isinstance(module._buffers, dict):
                # The whole dict: a layer that registers a buffer adds it to this one.
                writes.append((vars(module), "_buffers", swap))
            else:  # a scripted module has a fixed set of buffers, kept in C++
                writes += [(module._buffers, name, buffer) for name, buffer in swap.items()]
        return [journal.changed(writes)] if writes else []

    def _check_saved(self) -> None:
        if self.lost is not None:
            module, name = self.lost
            raise RuntimeError(
                f"{type(module).__name__} must edit its buffer {name!r} in every forward or in "
                "none: it did for the first time after an earlier run that did not, and the value "
                "before is needed to run the forward again, as for recomputation, or because "
                "layers draw random numbers that did not before. Assign a new tensor to the buffer "
                "instead of editing it, or write activation_checkpointing='never'."
            )
