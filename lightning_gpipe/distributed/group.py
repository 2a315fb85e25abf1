"""A process group for what the processes of a pipeline exchange beside its tensors.

Batches before they are on a device, norms, decisions and checkpoints go through the memory of the
hosts, over Gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.core.transport import (
    OBSERVED,
    OWN,
    SAME_CODE,
    OutOfStep,
    RankFailed,
    abort_group,
    bytes_in,
    receive_value,
    send_value,
    users_line,
)

FAILURE_TIMEOUT = 5.0  # seconds from an error of the network until a failure is known
_POLL = 0.1  # seconds
_TEXT = 200  # bytes
_LAST = "the last process to "  # what each waits for, where they only meet


class Watcher(Protocol):
    """Knows which process has failed: a pipeline, or a lifeline."""

    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Return how another process has failed, or None after ``within`` seconds."""
        ...

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        """Call ``act``, a method of a living object, when waiting for a process is in vain."""


class Group:
    """A process group over Gloo, made in all processes at once.

    Args:
        timeout: How long to wait for the other processes.
        ranks: The global ranks of each group of them; None for one of all.

    Attributes:
        process_group: The group of torch.distributed; None once it is left.
        rank: The number of this process in the group.
        ranks: The global rank of each process.
        size: The number of processes.
        watchers: Those that know which process has failed.
    """

    def __init__(self, timeout: timedelta, ranks: list[list[int]] | None = None) -> None:
        self._timeout = timeout
        self.process_group: Any
        self.process_group, _ = dist.new_subgroups_by_enumeration(
            ranks or [list(range(dist.get_world_size()))], timeout=timeout, backend="gloo"
        )
        self.watchers: Sequence[Watcher] = ()
        self.rank = dist.get_rank(self.process_group)
        self.ranks: list[int] = dist.get_process_group_ranks(self.process_group)
        self.size = len(self.ranks)
        self._operations = 0  # so far
        self._name = f"processes {self.ranks}"

    def abort(self) -> None:
        """End all waits in the group with errors; it is of no use any more."""
        if self.process_group is not None:
            abort_group(self.process_group)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """A ``with`` block that is one operation of all processes, which compare what it is for.

        Raises:
            RankFailed: If one has failed; names it, and what was awaited.
            OutOfStep: If some are in another operation; names it.
            RuntimeError: If some do not come in time; names them, and where they are.
        """
        self._operations += 1
        began = time.monotonic()
        try:
            with OWN.within(self._name, self._operations, self.ranks, what):
                self._compare(what)
                yield
        except RuntimeError as error:
            if isinstance(error, RankFailed | OutOfStep):
                raise
            if time.monotonic() - began >= self._timeout.total_seconds():
                raise RuntimeError(self._late(what)) from error
            failure = self._failure(FAILURE_TIMEOUT)
            if failure is not None:
                raise type(failure)(f"{failure}, while {what} was awaited") from error
            raise

    def _compare(self, what: str) -> None:
        purposes = self._texts(what)
        if len(set(purposes)) > 1:
            if (failure := self._failure(_POLL)) is not None:
                raise failure
            lines = self._texts(users_line())
            described = (
                f"rank {rank} waits for {purpose} (at {line})"
                for rank, purpose, line in zip(self.ranks, purposes, lines, strict=True)
            )
            raise OutOfStep(
                "all processes must do the same in the same order: "
                f"{', '.join(described)}. {SAME_CODE}"
            )

    def _texts(self, own: str) -> list[str]:
        """Return the texts of all processes, shortened."""
        content = own.encode()[:_TEXT].ljust(_TEXT)
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everyone = [torch.empty_like(sent) for _ in self.ranks]
        dist.all_gather(everyone, sent, group=self.process_group)
        return [bytes(each.tolist()).decode(errors="ignore").rstrip() for each in everyone]

    def _late(self, what: str) -> str:
        """Return the error message for processes that have not come in time."""
        late = [
            f"rank {k} {where}"
            for k, where in OBSERVED.items()
            if k in self.ranks and where.begun.get(self._name, 0) < self._operations
        ]
        purpose = what.removeprefix(_LAST)
        return (
            f"all processes must come to {purpose} within {self._timeout.total_seconds():g} s, the "
            f"timeout: {'; '.join(late) or 'some'} did not. If it is only slow, set a longer "
            "GPipeStrategy(timeout=...)."
        )

    def _failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Return how another process has failed, as soon as it is known, or None."""
        deadline = time.monotonic() + within
        while self.watchers and time.monotonic() < deadline:
            for watcher in self.watchers:
                if (failure := watcher.failure(_POLL)) is not None:
                    return failure
        return None

    def broadcast(self, value: Any, source: int = 0, what: str = "a broadcast") -> Any:
        """Return the value of process ``source``; in all others its tensors are on the CPU."""
        with self.waiting_for(what):
            exchange = partial(dist.broadcast, group_src=source, group=self.process_group)
            if self.rank != source:
                return receive_value(exchange)
            send_value(value, exchange)
            return value

    def all(self, own: Any) -> list[Any]:
        """Return the value of each process, in the order of their ranks."""
        return [self.broadcast(own, rank) for rank in range(self.size)]

    def overwrite(self, tensor: Tensor, source: int = 0) -> None:
        """Give ``tensor`` the values that it has in process ``source``."""
        if not tensor.numel():
            return
        with self.waiting_for("a broadcast"):
            host = tensor.detach().cpu().contiguous()
            dist.broadcast(bytes_in(host), group_src=source, group=self.process_group)
            if self.rank != source:
                with torch.no_grad():
                    tensor.copy_(host)

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all processes in the first one, and nothing in the others.

        The first gets them one after another, with their tensors on the CPU.
        """
        with self.waiting_for("the parts of a checkpoint"):
            if self.rank == 0:
                return [own, *map(self._receive, range(1, self.size))]
            send_value(own, partial(dist.send, group_dst=0, group=self.process_group))
            return []

    def _receive(self, source: int) -> Any:
        return receive_value(partial(dist.recv, group_src=source, group=self.process_group))

    def sum(self, tensor: Tensor, what: str = "a sum over all") -> Tensor:
        """Return the sum over all processes of a tensor on the CPU, which is changed."""
        with self.waiting_for(what):
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def decide(self, decision: bool, *, all: bool) -> bool:
        """Return True if all processes decide so, or any."""
        what = f"a vote whether {'all' if all else 'any'} decide so"
        votes = int(self.sum(torch.tensor(int(decision)), what))
        return votes == self.size if all else votes > 0

    def meet(self, purpose: str) -> None:
        """Wait until all processes are here, for as long as the timeout.

        Raises:
            RuntimeError: Names those that do not come, and the purpose.
        """
        with self.waiting_for(f"{_LAST}{purpose}"):
            pass  # they compare it, for which all must be here

    def leave(self) -> None:
        """Close the connections; a process that waits for this one gets an error."""
        group = self.process_group
        self.process_group = None  # the connections close when nothing refers to the group
        dist.destroy_process_group(group)
