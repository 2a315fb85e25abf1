"""Buffers that layers change as they run, kept as a forward found them.

The power iteration of a spectral norm, a moving average, a counter: a layer that moves such a state
on with every forward computes something else when it is run again. A recomputation must find the
buffers as the first forward did, and must not move them on a second time.

What was found is kept by reference, which is enough for a layer that puts a new buffer in the slot
of the old one, and by value where a layer may edit it. Large buffers, such as masks, are seldom
edited: they are copied in the first run, and from then on if they were edited in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_gpipe.core.faithful.behavior import Behavior
from lightning_gpipe.core.faithful.journal import Journal, Write
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.plan import Slot

_Buffers = dict[nn.Module, dict[str, Tensor | None]]

_LARGE = 2**20  # bytes


class Buffers:
    """The buffers that some modules have now.

    Args:
        modules: The modules.
        copied: Whether the value of a large buffer is kept, by its slot.
        ignored: Whether edits of the buffer in a slot do not matter.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        copied: Callable[[Slot], bool],
        ignored: Callable[[Slot], bool] = lambda slot: False,
    ) -> None:
        self._modules = tuple(modules)
        self._found = _buffers_of(self._modules)
        self._values: dict[Tensor, Tensor] = {}
        self._versions: dict[Slot, tuple[Tensor, int]] = {}
        for module, buffers in self._found.items():
            for name, buffer in buffers.items():
                if buffer is None or ignored((module, name)):
                    continue
                self._versions[module, name] = buffer, _version(buffer)
                small = buffer.nbytes <= _LARGE or buffer.is_inference()
                if small or copied((module, name)):
                    self._values[buffer] = buffer.clone()

    @property
    def edits(self) -> set[Slot]:
        """The places whose buffers were edited since."""
        return {
            slot
            for slot, (buffer, version) in self._versions.items()
            if _version(buffer) != version
        }

    @property
    def lost(self) -> Slot | None:
        """A slot whose value is not known any more, if there is one."""
        found = (slot for slot in self.edits if self._versions[slot][0] not in self._values)
        return next(found, None)

    def refuse_lost(self) -> None:
        """Raise if there is a value that is not known any more."""
        if self.lost is not None:
            module, name = self.lost
            raise RuntimeError(
                f"{type(module).__name__} must edit its buffer {name!r} in every forward or in "
                "none: it did for the first time after an earlier run that did not, and what it "
                "was is needed to run the forward again. Assign a new tensor to the buffer instead "
                "of editing it, or write activation_checkpointing='never'."
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back, with the values that they had."""
        for module in self._modules:
            _put(module, self._found.get(module, {}))
        for buffer, value in self._values.items():
            if not torch.equal(buffer, value):  # a graph of the user's may have saved it
                buffer.data.copy_(value)  # no edit to a graph that has saved it since

    def lent(self, journal: Journal) -> list[Manager]:
        """What lends the modules the buffers that they had, to change them in a ``with`` block.

        The buffers whose values were kept are not written to: a graph may have saved them. Where
        there are none now and were none there is nothing to do.
        """
        writes = list(self._loans())
        return [journal.changed(writes)] if writes else []

    def _loans(self) -> Iterator[Write]:
        for module in self._modules:
            found = self._found.get(module, {})
            if not (found or module._buffers):
                continue
            lent = {n: b if b is None else self._values.get(b, b) for n, b in found.items()}
            if isinstance(module._buffers, dict):
                # One write: layers that register buffers do so in what was lent.
                yield vars(module), "_buffers", lent
            else:  # a scripted module's, which are kept in C++ and always the same ones
                yield from ((module._buffers, name, buffer) for name, buffer in lent.items())


class StageBuffers:
    """The buffers of one stage's modules.

    Args:
        modules: The modules.
        deferred: Whether batch norms in training leave their running statistics alone.
    """

    def __init__(self, modules: Iterable[nn.Module], *, deferred: bool) -> None:
        self._modules = tuple(modules)
        self._deferred = deferred

    def small(self) -> Buffers:
        """All buffers as they are, and the values of those that are not large."""
        return Buffers(self._modules, copied=self._uncounted, ignored=self._left_alone)

    def before(self, behavior: Behavior) -> Buffers:
        """The buffers as they are before a run of the layers, of which so much is known."""
        known = behavior.edited_buffers
        return Buffers(
            self._modules,
            copied=lambda slot: known is None or slot in known or self._uncounted(slot),
            ignored=self._left_alone,
        )

    def after(self, behavior: Behavior, buffers: Buffers) -> None:
        """Learn from the run which of them the layers edit.

        Raises:
            RuntimeError: If they edited one that they did not edit before.
        """
        buffers.refuse_lost()
        if behavior.edited_buffers is None:
            behavior.edited_buffers = buffers.edits

    def _uncounted(self, slot: Slot) -> bool:
        """Whether PyTorch does not count the edits: those of running statistics."""
        return isinstance(slot[0], _NormBase)

    def _left_alone(self, slot: Slot) -> bool:
        module = slot[0]
        return self._deferred and isinstance(module, _BatchNorm) and module.training


def _buffers_of(modules: Iterable[nn.Module]) -> _Buffers:
    """Those of the modules that have any."""
    return {module: dict(module._buffers) for module in modules if module._buffers}


def _put(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Let ``module`` have these buffers, and no others."""
    for name in [name for name in module._buffers if name not in buffers]:
        del module._buffers[name]
    module._buffers.update(buffers)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
