"""Batches that one process loads and sends to the others.

If each process loaded its batches, random augmentation or a stream of unknown length would make
them differ. So the first process loads them, and tells the others when there are no more. It also
sends the states of the random generators that have changed since the last one, and in a prediction
the indices of the rows. A process that does not read a batch gets it on the meta device, without
values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import count as count_up
from itertools import product
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_gpipe.core.data import map_tensors, outline, tensors_of
from lightning_gpipe.core.faithful import RandomState
from lightning_gpipe.distributed.group import Group

_HOOKS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
_VALUES = "the values of a batch"
_INDICES = "seen_batch_indices"  # of a prediction's batch sampler, for callbacks that write


class SharedLoader:
    """A dataloader whose batches the first process loads, and all processes get.

    It has that dataloader's attributes and, by ``isinstance``, its class. ``readers`` returns the
    places of the processes that read the next batch; None for all.
    """

    loader: Any = None  # of an object that is being copied

    def __init__(
        self, loader: Any, group: Group, readers: Callable[[], Collection[int] | None]
    ) -> None:
        # The first one's length for all: a shorter loop would take another broadcast for a batch.
        length: int | None = group.broadcast(sized_len(loader))
        # Iterations over the batches are counted.
        vars(self).update(
            loader=loader, _group=group, _readers=readers, _length=length, _iterations=0
        )

    @property  # type: ignore[misc]  # isinstance reads it, and nothing sets it
    def __class__(self) -> Any:
        return type(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    @property
    def _batch_sampler(self) -> Any:
        return getattr(self.loader, "batch_sampler", None)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the dataloader of the first process has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        if self._group.rank:
            return self._receive(self._iterations)
        loading = self._load(self._iterations)
        next(loading)
        return loading

    def _load(self, iteration: int) -> Iterator[Any]:
        """Yield None once there is an iterator, which may draw random numbers; then the batches."""
        before, failure, count = RandomState.capture(), None, 0
        batches: Iterator[Any] = iter(())
        try:
            batches = iter(self.loader)
        except BaseException as error:
            failure = error
        yield None
        for number in count_up():
            try:
                if failure is not None:
                    raise failure
                batch = [next(batches)]
            except StopIteration:
                batch = []
            except BaseException as error:
                failed = f"{type(error).__name__}: {error}"
                self._share((failed, None, [], [], None), number, iteration)
                raise
            # Also what one process has drawn since by itself, as in a callback of the first one.
            states = RandomState.capture().states if before.differences() else None
            indices = getattr(self._batch_sampler, _INDICES, [])
            readers = self._readers() if batch else None
            shared = batch if readers is None else map_tensors(outline, batch)
            self._share((None, states, shared, indices[count:], readers), number, iteration)
            self._group.hand(batch, set(readers or ()), _VALUES)
            before, count = RandomState.capture(), len(indices)
            if not batch:
                return
            yield batch[0]

    def _receive(self, iteration: int) -> Iterator[Any]:
        indices: list[list[int]] = []
        if isinstance(self._batch_sampler, _IndexBatchSamplerWrapper):
            setattr(self._batch_sampler, _INDICES, indices)
        for number in count_up():
            failure, states, batch, new_indices, readers = self._share(None, number, iteration)
            if failure is not None:
                first = f"rank {self._group.ranks[0]}, which loads the batches"
                raise RuntimeError(f"{first}, failed: {failure}")
            if states is not None:
                RandomState.capture()._replace(states=states).restore()
            indices += new_indices
            if not batch:
                return
            if readers is not None:
                reads = self._group.rank in readers
                batch = self._group.take(_VALUES) if reads else map_tensors(_on_meta, batch)
            yield batch[0]

    def _share(self, value: Any, number: int, iteration: int) -> Any:
        what = f"batch {number} in iteration {iteration} over a dataloader"
        return self._group.broadcast(value, what=what)


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def is_without_values(batch: Any) -> bool:
    """Return True for a batch that this process does not read."""
    return any(tensor.is_meta for tensor in tensors_of(batch))


def has_batch_hooks(*owners: Any) -> bool:
    """Return True if a LightningModule or a LightningDataModule changes batches in hooks."""
    pairs = product(filter(None, owners), _HOOKS)
    return any(is_overridden(name, owner) for owner, name in pairs)


def unshare(trainer: Trainer) -> None:
    """Give the Trainer's loops, and a CombinedLoader of the user, the dataloaders themselves."""
    fit = trainer.fit_loop
    others = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
    for loop in (fit, fit.epoch_loop.val_loop, *others):
        combined = loop._combined_loader
        if combined is not None:
            loaders = combined.flattened
            combined.flattened = [x.loader if isinstance(x, SharedLoader) else x for x in loaders]
