"""Weights that live in the memory of the host, and are on a device only around their use.

So a model may be larger than all devices together. The copies on the device are the stage's shadows
of one mini-batch: their memory comes and goes, while the graphs of micro-batches keep the shadows.
What autograd saves of a weight for backward would keep the memory too, so it saves where it was
instead, and finds it in the copy that is there in backward.

The caller may change the weights after a phase, so the host waits for the copies at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import checksums, record_stream
from lightning_gpipe.core.faithful import Hooks, Shadows, add_note, placeholder
from lightning_gpipe.core.layout import HOST
from lightning_gpipe.core.run.host.side_copies import SideCopies
from lightning_gpipe.core.run.shared_parameters import Pair
from lightning_gpipe.core.run.stage import Stage


class _SavedWeight(NamedTuple):
    """A tensor that autograd saves, as a view of the values of a weight."""

    weight: int
    view: tuple[Any, Any, Any]  # size, stride and offset


class HostWeights:
    """The weights of one stage in one mini-batch, whose home is the host.

    Args:
        stage: The stage, on a GPU.
        shadows: Its shadows, those of weights at home on the host without values yet.
    """

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self._stage = stage
        self._device = stage.device
        self._pairs = shadows.hosted  # of tensors on the host and on the device
        self._weight_of: dict[int, int] = {}  # by the storage, while the values are on the device
        self._coming: torch.cuda.Event | None = None  # until the device waits for it
        self._examined = shadows.examined
        self._loaded: list[Tensor] = []  # checksums of the values that are on the device
        self._left: list[tuple[list[Tensor], list[Tensor]]] = []  # before and after each turn
        self._copies = SideCopies(stage.device)
        self.settle = self._copies.settle

    def load(self) -> None:
        """Begin to copy the weights to the device, beside what it computes."""
        try:
            for weight, copy in self._pairs:
                copy.data = torch.empty_like(weight, device=self._device, requires_grad=False)
        except torch.OutOfMemoryError as error:
            add_note(error, f"raised in loading the weights of {self._stage}")
            raise
        self._weight_of = {memory_of(copy): k for k, (_, copy) in enumerate(self._pairs)}
        with self._copies.beside("to the device"):
            for weight, copy in self._pairs:
                copy.data.copy_(weight.detach(), non_blocking=True)
        self._coming = self._copies.latest

    def await_values(self) -> None:
        """Let what the device computes from now on wait for the weights."""
        if self._coming is not None:
            torch.cuda.current_stream(self._device).wait_event(self._coming)
            self._coming = None
            if self._examined:
                self._loaded = self._checksums()

    def drop(self) -> None:
        """Give the memory back; what the device computes until now still finds the weights."""
        if self._examined:
            self._left.append((self._loaded, self._checksums()))
        self._weight_of = {}
        for weight, copy in self._pairs:
            copy.data = placeholder(weight, self._device)

    def take_edited(self) -> Tensor | None:
        """Return a weight that was edited on the device, if it was looked for and there is one."""
        turns, self._left = self._left, []
        if self._examined and self._weight_of and self._coming is None:
            turns.append((self._loaded, self._checksums()))
        self._examined = False  # only edits in forward are looked for
        for before, after in turns:
            for k, (weight, _) in enumerate(self._pairs):
                if not torch.equal(before[k], after[k]):
                    return weight
        return None

    def _checksums(self) -> list[Tensor]:
        return [checksums(copy.detach()) for _, copy in self._pairs]

    def around(self, hooks: Hooks) -> Hooks:
        """Return hooks with which autograd saves no weights, and what is none with ``hooks``."""
        pack, unpack = hooks
        return partial(self._pack, pack), partial(self._unpack, unpack)

    def bring_home(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Begin to copy the gradients of weights on the host there."""
        at_home = []
        with self._copies.beside("to the host") as stream:
            for weight, gradient in pairs:
                if weight.device == HOST != gradient.device:
                    on_device, gradient = gradient, _to_host(gradient)
                    record_stream(on_device, stream)
                at_home.append((weight, gradient))
        return at_home

    def _pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        k = self._weight_of.get(memory_of(tensor))
        if (
            k is None
            or tensor.dtype != self._pairs[k][1].dtype
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return pack(tensor)
        return _SavedWeight(k, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def _unpack(self, unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
        if not isinstance(saved, _SavedWeight):
            return unpack(saved)
        if not self._weight_of:
            raise RuntimeError(
                f"backward through {self._stage} must come with the pipeline's: its weights are "
                "in the memory of the host, and on the device only while the stage runs. Let the "
                "layer return the tensor, or hand it out with loss_term(name, value)."
            )
        copy = self._pairs[saved.weight][1].detach()
        return copy.as_strided(*saved.view)


def memory_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for one that is made of other tensors."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _to_host(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.cpu()
    at_home = torch.empty_like(gradient, device="cpu", pin_memory=True)
    return at_home.copy_(gradient, non_blocking=True)
