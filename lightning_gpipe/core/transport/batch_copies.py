"""Tensors of a batch that are on the device of the first stage already.

A Trainer moves a whole batch to one device, that of the targets and the loss, and the pipeline
begins at another one. To copy its input from there would take it over two links, and the second
copy would wait for the first. So what the pipelines took of the batch before is copied to the first
stage when the Trainer moves it, from where the loader put it and as it asks for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_gpipe.core.data import copy_marks, record_stream


class _Twin(NamedTuple):
    """A tensor that was moved: which one of its batch, its version then, and the copy if any."""

    moved: weakref.ref[Tensor]
    number: int
    version: int
    copy: Tensor | None
    ready: torch.cuda.Event | None


class BatchCopies:
    """The copies of one batch after another on a device.

    Args:
        device: That of the first stage.
        root: That to which batches are moved, another one.
    """

    def __init__(self, device: torch.device, root: torch.device) -> None:
        self._device, self._root = device, root
        self._twins: dict[int, _Twin] = {}  # by the address of the moved tensor's memory
        self._number = 0  # of tensors moved of this batch
        self._taken: set[int] = set()  # the numbers of what pipelines have taken of this batch
        self._copied: set[int] = set()  # of what is copied: what they took of the one before

    def moving(self) -> TorchFunctionMode:
        """A ``with`` block in which a batch is moved to the root device."""
        self._twins, self._number = {}, 0
        self._copied, self._taken = self._taken, set()
        return _Watch(self._add)

    def of(self, tensor: Tensor) -> Tensor:
        """The same values on the device of the first stage, if they are there; else ``tensor``.

        Of a view of what was moved, the same view. The current stream may read it.
        """
        if tensor.device != self._root or tensor.requires_grad or tensor.is_inference():
            return tensor
        twin = self._twins.get(tensor.untyped_storage().data_ptr())
        moved = None if twin is None else twin.moved()
        if twin is None or moved is None or tensor._version != twin.version:
            return tensor
        self._taken.add(twin.number)
        if twin.copy is None or tensor.dtype != moved.dtype:
            return tensor
        if twin.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(twin.ready)
            record_stream(twin.copy, stream)
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        return copy_marks(tensor, twin.copy.as_strided(*view))

    def _add(self, source: Tensor, moved: Tensor, non_blocking: bool) -> None:
        plain = type(source) is Tensor is type(moved) and moved.layout is torch.strided
        if not plain or source.device.type != "cpu" or moved.device != self._root:
            return
        if moved.requires_grad or moved.is_inference() or moved.storage_offset():
            return
        number, self._number = self._number, self._number + 1
        copy, ready = None, None
        if number in self._copied:
            copy = source.to(self._device, moved.dtype, non_blocking=non_blocking)
            if copy.stride() != moved.stride():
                copy = None
            elif copy.is_cuda:
                ready = torch.cuda.current_stream(self._device).record_event()
        address = moved.untyped_storage().data_ptr()
        still = weakref.ref(moved, lambda _: self._twins.pop(address, None))  # frees the copy
        self._twins[address] = _Twin(still, number, moved._version, copy, ready)


class _Watch(TorchFunctionMode):
    """Tells of each tensor that is moved: the source, the result, and whether it may return early.

    Args:
        add: Is told.
    """

    def __init__(self, add: Callable[[Tensor, Tensor, bool], None]) -> None:
        super().__init__()
        self._add = add

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cuda) and result is not args[0]:
            flags = (each for each in args[1:] if isinstance(each, bool))
            non_blocking = kwargs.get("non_blocking", next(flags, False))  # the first, by position
            self._add(args[0], result, non_blocking)
        return result
