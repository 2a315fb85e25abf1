"""What the processes of a pipeline tell one another beside what the pipeline sends.

All of it goes through the memory of the hosts, over Gloo: batches before they are on a device,
norms, decisions, checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.core.transport import RankFailed, end_waits
from lightning_gpipe.processes.parcel import as_bytes, emptied, pack, unpack

_KNOWN_WITHIN = 5.0  # seconds from an error of the network until it is known who has failed

_POLL = 0.1

P = ParamSpec("P")
T = TypeVar("T")


Method = Callable[Concatenate["Group", P], T]


def _waits_for(what: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """A method that waits for other processes: if one has failed, its error is that.

    Args:
        what: What it waits for, in words.
    """

    def decorate(method: Method[P, T]) -> Method[P, T]:
        @wraps(method)
        def waiting(group: Group, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with group.waiting_for(what):
                return method(group, *args, **kwargs)

        return waiting

    return decorate


class Watcher(Protocol):
    """What knows which process has failed: a pipeline, or a lifeline."""

    def failure(self, within: float) -> RankFailed | None:
        """How another process has failed, if one has, once it is known or so many seconds later."""
        ...

    def when_in_vain(self, act: Callable[[], None]) -> None:
        """Call ``act``, a method of an object that lives, when such a wait is in vain."""


class Group:
    """A process group over Gloo, made in all processes at once.

    Args:
        timeout: How long to wait for the other processes.
        ranks: The global ranks of each group of them; None for one of all.

    Attributes:
        rank: The number of this process in it.
        ranks: The global rank of each.
        size: How many there are.
        watchers: What knows which process has failed.
    """

    def __init__(self, timeout: timedelta, ranks: list[list[int]] | None = None) -> None:
        self._timeout = timeout
        self._group: Any
        self._group, _ = dist.new_subgroups_by_enumeration(
            ranks or [list(range(dist.get_world_size()))], timeout=timeout, backend="gloo"
        )
        self.watchers: Sequence[Watcher] = ()
        self.rank = dist.get_rank(self._group)
        self.ranks: list[int] = dist.get_process_group_ranks(self._group)
        self.size = len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """That of torch.distributed."""
        group: dist.ProcessGroup = self._group
        return group

    def end_waits(self) -> None:
        """End all waits in it; it is of no use any more."""
        if self._group is not None:
            end_waits(self._group)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """A ``with`` block in which an error of the network is that of the process that failed.

        Args:
            what: What it waits for, in words.

        Raises:
            RankFailed: Names that process.
        """
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            patient = time.monotonic() - began >= self._timeout.total_seconds()
            failure = None if patient else self._failure()
            if failure is not None:
                raise RankFailed(f"{failure}, while {what} was awaited") from error
            raise

    def _failure(self) -> RankFailed | None:
        """How another process has failed, as soon as it is known."""
        deadline = time.monotonic() + _KNOWN_WITHIN
        while self.watchers and time.monotonic() < deadline:
            for each in self.watchers:
                if (failure := each.failure(_POLL)) is not None:
                    return failure
        return None

    def broadcast(self, value: Any, source: int = 0, what: str = "a broadcast") -> Any:
        """The value that process ``source`` has; its tensors on the CPU in all others.

        Args:
            value: The value, in that process.
            source: The process.
            what: What it is, in words.
        """
        with self.waiting_for(what):
            return self._broadcast(value, source)

    def all(self, own: Any) -> list[Any]:
        """What each process has, in the order of their ranks."""
        return [self.broadcast(own, rank) for rank in range(self.size)]

    def _broadcast(self, value: Any, source: int) -> Any:
        here = self.rank == source
        parcel = pack(value) if here else None
        text = self._broadcast_bytes(parcel.text if parcel is not None else None, source)
        parcel = parcel or emptied(text)
        for tensor in parcel.tensors:
            if tensor.numel():
                dist.broadcast(as_bytes(tensor), group_src=source, group=self._group)
        return value if here else unpack(parcel)

    @_waits_for("a broadcast")
    def overwrite(self, tensor: Tensor, source: int = 0) -> None:
        """Give ``tensor`` the values that it has in process ``source``."""
        if not tensor.numel():
            return
        host = tensor.detach().to("cpu", memory_format=torch.contiguous_format)
        dist.broadcast(as_bytes(host), group_src=source, group=self._group)
        if self.rank != source:
            with torch.no_grad():
                tensor.copy_(host)

    @_waits_for("one that takes a part of a checkpoint")
    def send(self, value: Any, to: int) -> None:
        """Send a value to process ``to``, which calls :meth:`receive`."""
        parcel = pack(value)
        text = torch.frombuffer(bytearray(parcel.text), dtype=torch.uint8)
        dist.send(torch.tensor(text.numel()), group_dst=to, group=self._group)
        dist.send(text, group_dst=to, group=self._group)
        for tensor in parcel.tensors:
            if tensor.numel():
                dist.send(as_bytes(tensor), group_dst=to, group=self._group)

    @_waits_for("a part of a checkpoint")
    def receive(self, source: int) -> Any:
        """The value that process ``source`` sends, with its tensors on the CPU."""
        size = torch.tensor(0)
        dist.recv(size, group_src=source, group=self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, group_src=source, group=self._group)
        parcel = emptied(text.numpy().tobytes())
        for tensor in parcel.tensors:
            if tensor.numel():
                dist.recv(as_bytes(tensor), group_src=source, group=self._group)
        return unpack(parcel)

    @_waits_for("a sum over all")
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes of a tensor on the CPU, which is changed."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def decide(self, decision: bool, *, all: bool) -> bool:
        """Whether all processes decide so, or any."""
        votes = int(self.sum(torch.tensor(int(decision))))
        return votes == self.size if all else votes > 0

    def meet(self, purpose: str) -> None:
        """Wait until all processes are here, for as long as the timeout.

        Args:
            purpose: What they come for, for the message.

        Raises:
            RuntimeError: Names those that do not come.
        """
        began = time.monotonic()
        with self.waiting_for(f"the last process to {purpose}"):
            try:
                dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
            except RuntimeError as error:
                waited = min(time.monotonic() - began, self._timeout.total_seconds())
                raise RuntimeError(
                    f"all processes must {purpose} together: rank {self.rank} of {self.size} "
                    f"waited for {waited:.3g} s. {error}"
                ) from error

    def leave(self) -> None:
        """Close the connections; whoever waits for this process gets an error."""
        group, self._group = self._group, None  # they are closed when nobody refers to it
        dist.destroy_process_group(group)

    def _broadcast_bytes(self, text: bytes | None, source: int) -> bytes:
        size = torch.tensor(0 if text is None else len(text))
        dist.broadcast(size, group_src=source, group=self._group)
        if text is None:
            found = torch.empty(int(size), dtype=torch.uint8)
        else:
            found = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(found, group_src=source, group=self._group)
        return found.numpy().tobytes()
