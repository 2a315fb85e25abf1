"""Batches that one process loads, and all get.

Were each process to load its batches, random augmentation or a stream of unknown length would make
them differ, and a run would hang or, worse, go on with rows of two batches. So the first process
loads them, and tells the others when there are no more. What it drew of random numbers for that
they have drawn too, and in a prediction they know which rows it took.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

from lightning_gpipe.core.faithful import LibraryGenerators
from lightning_gpipe.processes.group import Group

_SEEN = "seen_batch_indices"  # of the batch sampler of a prediction, for callbacks that write


class Generators:
    """The generators of random numbers of the host: PyTorch's, Python's and NumPy's."""

    def __init__(self) -> None:
        self._libraries = LibraryGenerators()
        self._state = self.state()

    def state(self) -> Any:
        """Their states."""
        return torch.get_rng_state(), self._libraries.get_state()

    def moved(self) -> Any:
        """Their states, if they have moved since this was made, or None."""
        torch_state, library_state = self._state
        same = torch.equal(torch_state, torch.get_rng_state())
        return None if same and not self._libraries.moved(library_state) else self.state()

    def set(self, state: Any) -> None:
        """Set their states, if any are given."""
        if state is not None:
            torch_state, library_state = state
            torch.set_rng_state(torch_state)
            self._libraries.set_state(library_state)


class SharedLoader:
    """A dataloader of the first process, whose batches all processes get.

    Args:
        loader: The dataloader; that of the first process is used.
        group: The processes.
    """

    def __init__(self, loader: Any, group: Group) -> None:
        self.loader = loader
        self._group = group
        # One that ended earlier in some process would take what comes next for something else.
        self._length: int | None = group.broadcast(sized_len(loader))

    @property
    def dataset(self) -> Any:
        """That of the dataloader, if it has one."""
        return getattr(self.loader, "dataset", None)

    @property
    def sampler(self) -> Any:
        """That of the dataloader, whose epoch the Trainer sets."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """That of the dataloader, whose epoch the Trainer sets."""
        return getattr(self.loader, "batch_sampler", None)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the dataloader of the first process has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._group.rank:
            return self._receive()
        loading = self._load()
        next(loading)
        return loading

    def _load(self) -> Iterator[Any]:
        """First None, as soon as there is an iterator, which may draw; then the batches."""
        generators, failure, told = Generators(), None, 0
        batches: Iterator[Any] = iter(())
        try:
            batches = iter(self.loader)
        except BaseException as error:
            failure = error
        yield None
        while True:
            try:
                if failure is not None:
                    raise failure
                found = [next(batches)]
            except StopIteration:
                found = []
            except BaseException as error:
                self._share((f"{type(error).__name__}: {error}", None, [], []))
                raise
            drawn, seen = generators.moved(), getattr(self.batch_sampler, _SEEN, [])
            self._share((None, drawn, found, seen[told:]))
            told = len(seen)
            if not found:
                return
            yield found[0]
            generators = Generators()

    def _receive(self) -> Iterator[Any]:
        seen: list[list[int]] = []
        if isinstance(self.batch_sampler, _IndexBatchSamplerWrapper):
            setattr(self.batch_sampler, _SEEN, seen)
        while True:
            failure, drawn, found, new = self._share(None)
            if failure is not None:
                first = f"rank {self._group.ranks[0]}, which loads the batches"
                raise RuntimeError(f"{first}, failed: {failure}")
            Generators().set(drawn)
            seen += new
            if not found:
                return
            yield found[0]

    def _share(self, value: Any) -> Any:
        return self._group.broadcast(value, what="the next batch")


class StatefulLoader(SharedLoader):
    """The same of a dataloader that checkpoints keep the state of."""

    def state_dict(self) -> dict[str, Any]:
        """That of the dataloader."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load that of the dataloader."""
        self.loader.load_state_dict(state)


def shared(loader: Any, group: Group) -> SharedLoader:
    """A dataloader of the first process, for all."""
    kind = StatefulLoader if isinstance(loader, _Stateful) else SharedLoader
    return kind(loader, group)


def unshared(loader: Any) -> Any:
    """The dataloader itself, of one that all processes get the batches of."""
    return loader.loader if isinstance(loader, SharedLoader) else loader
