"""A process group for values that the processes of a pipeline exchange beside its tensors.

Batches before they are on a device, norms, decisions and checkpoints go through the memory of the
hosts, over Gloo, up and down a tree of the processes: a thousand of them meet in eight rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.core.data import checksum
from lightning_gpipe.core.transport import (
    OBSERVED,
    OWN,
    SAME_CODE,
    OutOfStep,
    RankFailed,
    Tree,
    abort_group,
    bytes_in,
    connecting_on_demand,
    ranges_of,
    receive_value,
    send_value,
    set_connected,
    users_line,
)

FAILURE_TIMEOUT = 5.0  # seconds from an error of the network until a failure is known
_POLL = 0.1  # seconds
_DIGEST = 7  # bytes
_MOST = 8  # processes in an error message
_MESSAGE = 2**25  # bytes, unless one tensor has more
AnyTensor = TypeVar("AnyTensor", bound=Tensor)
_LAST = "the last process to "  # what each waits for, where they only meet


class Watcher(Protocol):
    """Knows which process has failed: a pipeline, or a lifeline."""

    def failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Return the failure of another process, or None after ``within`` seconds."""
        ...

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        """Call ``act``, a method of a living object, when waiting for a process is in vain."""


class Group:
    """A process group over Gloo, made in all processes at once.

    ``ranks`` are the global ones of each group of them; None for one of all. ``process_group`` is
    None once it is left. ``watchers`` know which process has failed.
    """

    def __init__(self, timeout: timedelta, ranks: list[list[int]] | None = None) -> None:
        self._timeout = timeout
        self.process_group: Any
        ranks = ranks or [list(range(dist.get_world_size()))]
        with connecting_on_demand():
            self.process_group, _ = dist.new_subgroups_by_enumeration(
                ranks, timeout=timeout, backend="gloo"
            )
        self.watchers: Sequence[Watcher] = ()
        self.rank = dist.get_rank(self.process_group)
        self.ranks: list[int] = dist.get_process_group_ranks(self.process_group)
        self.size = len(self.ranks)
        self._tree = Tree(self.size)
        self._parent = self._tree.parent(self.rank)
        self._children = self._tree.children(self.rank)
        set_connected(self.process_group, self._tree.neighbours(self.rank))
        self._reduce(torch.zeros(1), torch.add)  # which connects them
        self._operations = 0  # so far
        self._name = f"processes {ranges_of(self.ranks)}"

    def abort(self) -> None:
        """End all waits in the group, which is unusable then."""
        if self.process_group is not None:
            abort_group(self.process_group)

    @contextmanager
    def waiting_for(self, what: str, content: Any = None) -> Iterator[bool]:
        """A ``with`` block that is one operation of all processes, which compare its purpose.

        Its value is True if the ``content``, which has a ``repr``, is the same in all of them.

        Raises:
            RankFailed: If one has failed; names it, and what was awaited.
            OutOfStep: If some are in another operation; names it.
            RuntimeError: If some do not come in time; names them, and where they are.
        """
        self._operations += 1
        began = time.monotonic()
        try:
            with OWN.within(self._name, self._operations, self.ranks, what):
                yield self._compare(what, repr(content))
        except RuntimeError as error:
            if isinstance(error, RankFailed | OutOfStep):
                raise
            if time.monotonic() - began >= self._timeout.total_seconds():
                raise RuntimeError(self._late(what)) from error
            with self.explaining(what):
                raise

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise RankFailed or OutOfStep, while waiting for ``what``, in place of network errors."""
        try:
            yield
        except RuntimeError as error:
            failure = self._failure(FAILURE_TIMEOUT)
            if failure is None:
                raise
            if isinstance(failure, OutOfStep):  # it says what each process waits for
                raise failure from error
            raise RankFailed(f"{failure}, while {what} was awaited") from error

    def _compare(self, what: str, content: str) -> bool:
        """Raise unless the purpose is the same in all processes; return whether the content is."""
        own = torch.tensor([_digest_of(what), _digest_of(content)])
        same_purpose, same_content = self._are_same(own).tolist()
        if same_purpose:
            return bool(same_content)
        # At once: one that has failed knows of no other failure, and would go on alone.
        everyone = self._collect((what, users_line()))
        failure = self._failure(_POLL)
        # One that has ended since then took part in this, and may have found the same.
        if failure is not None and not (isinstance(failure, RankFailed) and failure.ended):
            raise failure
        rarest = sorted(range(self.size), key=lambda k: _alike(everyone, k))[:_MOST]
        described = (
            f"rank {self.ranks[k]} waits for {everyone[k][0]} (at {everyone[k][1]})"
            for k in sorted(rarest)
        )
        raise OutOfStep(
            f"all processes must do the same in the same order: {', '.join(described)}. {SAME_CODE}"
        )

    def _are_same(self, own: Tensor) -> Tensor:
        """Return for each of some integers whether all processes have the same one."""
        least, most = self._reduce(torch.stack([own, ~own]), torch.minimum)
        return least == ~most

    def _reduce(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        tensor = tensor.contiguous()
        for child in self._children:
            other = torch.empty_like(tensor)
            self._receive(child, other)
            tensor = combine(tensor, other)
        if self._parent is not None:
            self._send([self._parent], tensor)
        return self._spread(tensor, 0)

    def _spread(self, tensor: Tensor, source: int) -> Tensor:
        """Give a tensor the values that it has in process ``source``, in all processes."""
        near = self._tree.neighbours(self.rank)
        if self.rank != source:
            nearest = self._tree.next_hop(self.rank, source)
            self._receive(nearest, tensor)
            near.remove(nearest)
        self._send(near, tensor)
        return tensor

    def _collect(self, own: Any) -> list[Any]:
        values = {self.rank: own}
        for child in self._children:
            values |= receive_value(partial(self._receive, child))
        if self._parent is not None:
            send_value(values, partial(self._send, [self._parent]))
        everyone = self._broadcast(values, 0)
        return [everyone[rank] for rank in range(self.size)]

    def _broadcast(self, value: Any, source: int) -> Any:
        spread = partial(self._spread, source=source)
        if self.rank != source:
            return receive_value(spread)
        send_value(value, spread)
        return value

    def _send(self, to: Sequence[int], tensor: Tensor) -> None:
        sends = [dist.isend(tensor, group_dst=k, group=self.process_group) for k in to]
        for send in sends:
            assert send is not None, "each is another process of the group"
            send.wait()

    def _receive(self, source: int, tensor: Tensor) -> None:
        dist.recv(tensor, group_src=source, group=self.process_group)

    def _late(self, what: str) -> str:
        late = [
            f"rank {k} {where}"
            for k, where in list(OBSERVED.items())
            if k in self.ranks and where.begun.get(self._name, 0) < self._operations
        ]
        purpose = what.removeprefix(_LAST)
        return (
            f"all processes must come to {purpose} within {self._timeout.total_seconds():g} s, the "
            f"timeout: {'; '.join(late) or 'some'} did not. If it is only slow, set a longer "
            "GPipeStrategy(timeout=...)."
        )

    def _failure(self, within: float) -> RankFailed | OutOfStep | None:
        """Return the failure of another process, as soon as it is known, or None."""
        deadline = time.monotonic() + within
        while self.watchers and time.monotonic() < deadline:
            for watcher in self.watchers:
                if (failure := watcher.failure(_POLL)) is not None:
                    return failure
        return None

    def broadcast(self, value: Any, source: int = 0, what: str = "a broadcast") -> Any:
        """Return the value of process ``source``; in all others its tensors are on the CPU."""
        with self.waiting_for(what):
            return self._broadcast(value, source)

    def all(self, own: Any) -> list[Any]:
        with self.waiting_for("the values of all"):
            return self._collect(own)

    def equalise(self, tensors: Sequence[Tensor], what: str) -> bool:
        """Give tensors the first process's values, if checksums differ; return True if any did."""
        sums = torch.tensor([int(checksum(each)) for each in tensors], dtype=torch.int64)
        with self.waiting_for(f"{len(tensors)} {what}", sums.tolist()) as same:
            if not same:
                pairs = zip(tensors, self._are_same(sums).tolist(), strict=True)
                for message in in_messages(tensor for tensor, same in pairs if not same):
                    self._overwrite(message)
        return not same

    def _overwrite(self, tensors: Sequence[Tensor]) -> None:
        hosts = [tensor.detach().cpu().contiguous() for tensor in tensors]
        contents = list(map(bytes_in, hosts))
        flat = self._spread(torch.cat(contents) if len(contents) > 1 else contents[0], 0)
        if self.rank == 0:
            return
        parts = flat.split([content.numel() for content in contents])
        for tensor, host, content, part in zip(tensors, hosts, contents, parts, strict=True):
            content.copy_(part)
            with torch.no_grad():
                tensor.copy_(host)

    def move(self, tensor: Tensor, source: int, target: int, what: str) -> None:
        """Give a CPU tensor of ``target`` the values in ``source``; others may leave it out."""
        if source == target or not tensor.numel() or self.rank not in (source, target):
            return
        content = bytes_in(tensor)
        with self.explaining(what):
            if self.rank == source:
                self._send([target], content)
            else:
                self._receive(source, content)

    def hand(self, value: Any, places: Collection[int], what: str) -> None:
        """Send a value to these processes, which :meth:`take` it."""
        others = sorted({*places} - {self.rank})
        if others:
            with self.explaining(what):
                send_value(value, partial(self._send, others))

    def take(self, what: str) -> Any:
        """Return the value that the first process hands to this one, its tensors on the CPU."""
        with self.explaining(what):
            return receive_value(partial(self._receive, 0))

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all, which come one after another, in the first process only."""
        with self.waiting_for("the parts of a checkpoint"):
            parts = [own, *(self._pass_up(own, rank) for rank in range(1, self.size))]
            return [] if self.rank else parts

    def _pass_up(self, own: Any, rank: int) -> Any:
        """Pass the value of a process on to the parent, if it comes here; the first returns it."""
        if self._parent is None:
            return receive_value(partial(self._receive, self._tree.next_hop(0, rank)))
        up = partial(self._send, [self._parent])
        if rank == self.rank:
            send_value(own, up)
        elif (child := self._tree.next_hop(self.rank, rank)) != self._parent:

            def pass_on(tensor: Tensor) -> None:
                self._receive(child, tensor)
                up(tensor)

            receive_value(pass_on)
        return None

    def sum(self, tensor: Tensor, what: str = "a sum over all") -> Tensor:
        """Return the sum over all processes of a tensor on the CPU."""
        with self.waiting_for(what):
            return self._reduce(tensor, torch.add)

    def decide(self, decision: bool, *, all: bool) -> bool:
        what = f"a vote whether {'all' if all else 'any'} decide so"
        votes = int(self.sum(torch.tensor(int(decision)), what))
        return votes == self.size if all else votes > 0

    def meet(self, purpose: str) -> None:
        """Wait until all are here; after the timeout a RuntimeError names those that are not."""
        with self.waiting_for(f"{_LAST}{purpose}"):
            pass  # they compare it, for which all must be here

    def leave(self) -> None:
        group = self.process_group
        self.process_group = None  # the connections close when nothing refers to the group
        dist.destroy_process_group(group)


def _digest_of(text: str) -> int:
    digest = sha256(text.encode()).digest()
    return int.from_bytes(digest[:_DIGEST], "little", signed=True)


def in_messages(tensors: Iterable[AnyTensor]) -> Iterator[list[AnyTensor]]:
    """Yield tensors that are sent together: small ones, or one large one."""
    message, size = list[AnyTensor](), 0
    for tensor in tensors:
        if message and size + tensor.nbytes > _MESSAGE:
            yield message
            message, size = [], 0
        message.append(tensor)
        size += tensor.nbytes
    if message:
        yield message


def _alike(everyone: Sequence[tuple[str, str]], k: int) -> int:
    return sum(purpose == everyone[k][0] for purpose, _ in everyone)
