"""Channels between GPUs of two processes: tensors go straight from one to the other.

Over a socket, a tensor of a GPU would be copied to the host, once it is computed, and back in the
other process. NCCL sends from GPU to GPU, on a stream, but its receiver must know what comes, and
occupies the GPU until it does.

So a value is announced over a socket, with the form of each of its tensors, and their bytes follow
on a channel: a communicator for one direction between two GPUs, made when it is first used. Both
sides use it in the order of the announcements, and no receive waits for whatever comes next::

    worker    compute | announce, send            keeps the tensor until the send has ended
    socket               header, form
    NCCL                 bytes --------------+
    link                 allocate, receive, event -> inbox -> the receiver's stream waits for it

Each channel has a stream for arrivals: a value must not wait for one from elsewhere.

# Note [A lost process ends its channels]
A kernel that waits for a lost process would wait for ever, and what torch does about it ends this
process before it says who is lost. So these communicators handle no errors and have no timeout: the
office, which hears of the loss, aborts them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gpipe.core.transport.process_group.connecting.address import environment_variable
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    DenseForm,
    GpuPair,
    bytes_in,
)

_FOREVER = timedelta(days=365)
_JOIN = 5.0  # seconds
_POLL = 0.001  # the same
_SOURCE, _TARGET = 0, 1  # the ranks in a communicator


class ChannelAborted(RuntimeError):
    """Raised where a channel is used after a process was lost."""


class _Send(NamedTuple):
    """A send that the GPU may not have ended yet."""

    work: Any  # of torch.distributed
    content: Tensor  # which must live, unchanged, until then
    stream: torch.cuda.Stream  # on which it was made

    def wait(self) -> None:
        """Let the stream that made the tensor wait for the end of the send."""
        with torch.cuda.stream(self.stream):
            self.work.wait()


class Channel:
    """One direction between a GPU of this process and one of another."""

    def __init__(self, communicator: Any, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._stream = torch.cuda.Stream(device)  # for arrivals
        self._lock = threading.Lock()  # of the sends
        self._sends: deque[_Send] = deque()
        # The last operation, which ends after all others. It may keep its tensor, that one only.
        self._last: Any = None

    @property
    def idle(self) -> bool:
        return self._last is None or bool(self._last.is_completed())

    def send(self, contents: Sequence[Tensor]) -> None:
        """Send after the work that the current stream has queued so far."""
        self._release()
        stream = torch.cuda.current_stream(self._device)
        for content in contents:
            work = self._communicator.send([content], _TARGET, 0)
            with self._lock:
                self._sends.append(_Send(work, content, stream))
                self._last = work

    def receive(self, form: DenseForm) -> tuple[Tensor, torch.cuda.Event]:
        """Receive into a new tensor; return it, and the event after which it may be read."""
        with torch.cuda.stream(self._stream):
            stored = torch.empty_strided(
                form.stored, form.stride, dtype=form.dtype, device=self._device
            )
            if stored.numel():
                self._last = self._communicator.recv([bytes_in(stored)], _SOURCE, 0)
                self._last.wait()
            return stored, self._stream.record_event()

    def settle(self) -> None:
        """Let the streams that made sent tensors wait until these may be changed, or freed."""
        with self._lock:
            sends, self._sends = self._sends, deque()
        for send in sends:
            send.wait()

    def abort(self) -> None:
        self._communicator.abort()

    def _release(self) -> None:
        """Free sent tensors: in a long phase they would be those of all micro-batches."""
        with self._lock:
            while self._sends and self._sends[0].work.is_completed():
                self._sends.popleft()


class Channels:
    """The channels of one process with all others, which find one another in ``store``."""

    def __init__(self, store: Store | None, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int, GpuPair], Channel] = {}
        self._aborted = False
        self._threads: list[threading.Thread] = []

    def send(self, rank: int, gpus: GpuPair, contents: Sequence[Tensor]) -> None:
        with self._in_use():
            self._channel(self._rank, rank, gpus).send([x for x in contents if x.numel()])

    def receive(self, rank: int, form: DenseForm) -> tuple[Tensor, torch.cuda.Event]:
        assert form.gpus is not None, "it comes straight"
        with self._in_use():
            return self._channel(rank, self._rank, form.gpus).receive(form)

    def settle(self) -> None:
        """Let streams wait until sent memory may be changed; raise ChannelAborted after a loss."""
        with self._in_use():
            for channel in self._all():
                channel.settle()

    def finish(self, timeout: float) -> bool:
        """Wait some seconds for the GPUs to send the last of a phase; return True if they have."""
        deadline = time.monotonic() + timeout
        while not (done := self._aborted or all(channel.idle for channel in self._all())):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        return done

    def abort(self) -> None:
        """End all channels for good, on threads: Note [A lost process ends its channels]."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        for channel in self._all():
            thread = threading.Thread(target=channel.abort, name="gpipe-end-channel", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN)

    def _all(self) -> list[Channel]:
        with self._lock:
            return [*self._channels.values()]

    def _channel(self, source: int, target: int, gpus: GpuPair) -> Channel:
        key = source, target, gpus
        with self._lock:
            if self._aborted:
                raise ChannelAborted("a process is lost")
            if key not in self._channels:
                own = gpus[0] if source == self._rank else gpus[1]
                assert self._store is not None, "offices of processes have one"
                name = f"{source}:{gpus[0]} to {target}:{gpus[1]}"
                store = PrefixStore(name, self._store)
                communicator = _communicator(store, _SOURCE if source == self._rank else _TARGET)
                self._channels[key] = Channel(communicator, torch.device("cuda", own))
            return self._channels[key]

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._aborted and not isinstance(error, ChannelAborted):
                raise ChannelAborted(str(error)) from error
            raise


class ArrivingTensors:
    """Receives the tensors of one value that come straight; all may be read after ``ready``."""

    def __init__(self, channels: Channels, rank: int) -> None:
        self.ready: torch.cuda.Event | None = None
        self._channels = channels
        self._rank = rank

    def receive(self, form: DenseForm) -> Tensor:
        stored, self.ready = self._channels.receive(self._rank, form)
        return stored


def _communicator(store: Store, rank: int) -> Any:
    """Make a process group of two over NCCL, which connects them when it is first used."""
    nccl: Any = distributed_c10d.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = _FOREVER
    with environment_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # the constructor reads it
        return nccl(store, rank, 2, options)
