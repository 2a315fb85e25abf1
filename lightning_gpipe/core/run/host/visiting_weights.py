"""Weights that are on a device only around their use, and elsewhere between.

The copies on the device are the stage's shadows of one mini-batch: their memory comes and goes,
while the graphs of micro-batches keep the shadows. A view of a weight that autograd saves for
backward would keep the memory too, so autograd saves its place in the weight instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.data import checksum
from lightning_gpipe.core.faithful import Hooks, Shadows, add_note, placeholder
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.run.stage import Stage

# The operators that the class of a weight defines are for its layer, not for moves.
plain_operators = torch._C.DisableTorchFunctionSubclass


class _SavedWeight(NamedTuple):
    """A tensor that autograd saves, as a view of the values of a weight."""

    part: int  # of the weights
    view: tuple[Any, Any, Any]  # size, stride and offset


class _SavedParts(NamedTuple):
    """A tensor that autograd saves, made of others, some of which are parts of weights."""

    kind: Any
    parts: dict[str, Any]
    rest: tuple[Any, Any, Any]  # what the class needs besides, size and stride


class VisitingWeights(ABC):
    """The weights of one stage in one mini-batch, some of which come and go.

    The shadows of these have no values yet. ``loaded`` is True once they are about to come.
    """

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self.loaded = False
        self._stage = stage
        self._device = stage.device
        self._parts = shadows.hosted  # with tensors elsewhere and on the device
        self._weight_of: dict[int, int] = {}  # by the storage, while the values are on the device
        self._wait: Callable[[], None] | None = None  # until the values have been waited for
        self._examined = shadows.examined
        self._before: list[Tensor] = []  # checksums of the values that are on the device
        self._left: list[tuple[list[Tensor], list[Tensor]]] = []  # before and after each turn

    @abstractmethod
    def _bring(self) -> Callable[[], None]:
        """Give the copies memory and begin to fill it; return what waits for the values."""

    def load(self) -> None:
        try:
            with plain_operators():
                self._wait = self._bring()
        except torch.OutOfMemoryError as error:
            add_note(error, f"raised in loading the weights of {self._stage}")
            raise
        self.loaded = True
        self._weight_of = {memory_of(part.copy): k for k, part in enumerate(self._parts)}

    def await_values(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None
            if self._examined:
                self._before = self._checksums()

    def drop(self) -> None:
        """Give the memory back; computation that is queued by now still finds the weights."""
        if self._examined:
            self._left.append((self._before, self._checksums()))
        self.loaded, self._weight_of = False, {}
        for _, at_home, copy in self._parts:
            copy.data = placeholder(at_home, self._device)

    def take_edited(self) -> Tensor | None:
        """Return a weight that was edited on the device, if it was looked for and there is one."""
        turns, self._left = self._left, []
        if self._examined and self.loaded and self._wait is None:
            turns.append((self._before, self._checksums()))
        self._examined = False  # only edits in forward are looked for
        for before, after in turns:
            for k, part in enumerate(self._parts):
                if not torch.equal(before[k], after[k]):
                    return part.weight
        return None

    def _checksums(self) -> list[Tensor]:
        with plain_operators():
            return [checksum(part.copy.detach()) for part in self._parts]

    def around(self, hooks: Hooks) -> Hooks:
        """Return hooks with which autograd saves places of weights, and by ``hooks`` the rest."""
        pack, unpack = hooks
        return partial(self._pack, pack), partial(self._unpack, unpack)

    def bring_home(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Begin to bring the gradients of weights to the home of these, if that is here."""
        return list(pairs)

    @abstractmethod
    def settle(self) -> None:
        """Let the host wait for all copies that are under way."""

    def _pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        saved = self._saved(tensor)
        return pack(tensor) if saved is tensor else saved

    def _saved(self, tensor: Tensor) -> Any:
        """Return the place of a tensor within the weights; the tensor if it is not in them."""
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
        if not self.loaded:
            raise RuntimeError(
                f"backward through {self._stage} must come with the pipeline's: its weights are "
                "on the device only while the stage runs. Let the layer return the tensor, or hand "
                "it out with loss_term(name, value)."
            )
        return self._restored(saved)

    def _restored(self, saved: Any) -> Tensor:
        if isinstance(saved, _SavedParts):
            parts = {name: self._restored(part) for name, part in saved.parts.items()}
            made: Tensor = saved.kind.__tensor_unflatten__(parts, *saved.rest)
            return made
        if isinstance(saved, _SavedWeight):
            with plain_operators():
                return self._parts[saved.part].copy.detach().as_strided(*saved.view)
        return saved


def memory_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for one that is made of other tensors."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
