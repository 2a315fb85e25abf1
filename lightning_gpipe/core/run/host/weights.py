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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.data import checksums, record_stream
from lightning_gpipe.core.faithful import Hooks, Shadows, add_note, placeholder
from lightning_gpipe.core.layout import HOST
from lightning_gpipe.core.run.host.side_copies import SideCopies
from lightning_gpipe.core.run.shared_parameters import Pair
from lightning_gpipe.core.run.stage import Stage

# The operators that the class of a weight defines are for its layer, not for moves.
_plain_operators = torch._C.DisableTorchFunctionSubclass


class _SavedWeight(NamedTuple):
    """A tensor that autograd saves, as a view of the values of a weight."""

    part: int  # of the weights
    view: tuple[Any, Any, Any]  # size, stride and offset


class _SavedParts(NamedTuple):
    """A tensor that autograd saves, made of others, some of which are parts of weights."""

    kind: Any
    parts: dict[str, Any]
    rest: tuple[Any, Any, Any]  # what the class needs besides, size and stride


class HostWeights:
    """The weights of one stage in one mini-batch, whose home is the host.

    Args:
        stage: The stage, on a GPU.
        shadows: Its shadows, those of weights at home on the host without values yet.
    """

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self._stage = stage
        self._device = stage.device
        self._parts = shadows.hosted  # with tensors on the host and on the device
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
            with _plain_operators():
                for _, at_home, copy in self._parts:
                    copy.data = torch.empty_like(at_home, device=self._device, requires_grad=False)
        except torch.OutOfMemoryError as error:
            add_note(error, f"raised in loading the weights of {self._stage}")
            raise
        self._weight_of = {memory_of(part.copy): k for k, part in enumerate(self._parts)}
        with _plain_operators(), self._copies.beside("to the device"):
            for _, at_home, copy in self._parts:
                copy.data.copy_(at_home.detach(), non_blocking=True)
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
        for _, at_home, copy in self._parts:
            copy.data = placeholder(at_home, self._device)

    def take_edited(self) -> Tensor | None:
        """Return a weight that was edited on the device, if it was looked for and there is one."""
        turns, self._left = self._left, []
        if self._examined and self._weight_of and self._coming is None:
            turns.append((self._loaded, self._checksums()))
        self._examined = False  # only edits in forward are looked for
        for before, after in turns:
            for k, part in enumerate(self._parts):
                if not torch.equal(before[k], after[k]):
                    return part.weight
        return None

    def _checksums(self) -> list[Tensor]:
        with _plain_operators():
            return [checksums(part.copy.detach()) for part in self._parts]

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
        saved = self._saved(tensor)
        return pack(tensor) if saved is tensor else saved

    def _saved(self, tensor: Tensor) -> Any:
        """Return where a tensor is within the weights; the tensor if nowhere."""
        if is_traceable_wrapper_subclass(tensor):
            names, rest = tensor.__tensor_flatten__()
            parts = {name: self._saved(getattr(tensor, name)) for name in names}
            if not any(isinstance(part, (_SavedWeight, _SavedParts)) for part in parts.values()):
                return tensor
            return _SavedParts(type(tensor), parts, (rest, tensor.size(), tensor.stride()))
        k = self._weight_of.get(memory_of(tensor))
        if (
            k is None
            or tensor.dtype != self._parts[k].copy.dtype
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return tensor
        return _SavedWeight(k, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def _unpack(self, unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
        if not isinstance(saved, (_SavedWeight, _SavedParts)):
            return unpack(saved)
        if not self._weight_of:
            raise RuntimeError(
                f"backward through {self._stage} must come with the pipeline's: its weights are "
                "in the memory of the host, and on the device only while the stage runs. Let the "
                "layer return the tensor, or hand it out with loss_term(name, value)."
            )
        return self._restored(saved)

    def _restored(self, saved: Any) -> Tensor:
        if isinstance(saved, _SavedParts):
            parts = {name: self._restored(part) for name, part in saved.parts.items()}
            made: Tensor = saved.kind.__tensor_unflatten__(parts, *saved.rest)
            return made
        if isinstance(saved, _SavedWeight):
            with _plain_operators():
                return self._parts[saved.part].copy.detach().as_strided(*saved.view)
        return saved


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
