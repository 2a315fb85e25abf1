"""A simulated NCCL, which sends between simulated GPUs as NCCL sends between real ones.

What is like NCCL, as far as two processes can tell:

- a communicator connects its two processes when it is first used, which waits for both;
- an operation is queued on the communicator's stream of the GPU, after what the caller's current
  stream has queued, and returns at once; it uses the memory until it has ended;
- the operations of a communicator run one after another, each as long as the other side's: two
  sides that both receive first, or both send first, wait for ever;
- ``work.wait()`` lets the caller's current stream wait for the end of the operation;
- nothing but ``abort()`` ends what waits for a process that is lost;
- a GPU is not connected with itself.

What is not: ``wait()`` of a receive blocks the host until the bytes are there, since what follows
runs at once. The clocks of the streams say what a GPU would do. There are no collectives.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

_HOST = "127.0.0.1"
_POLL = 0.01  # seconds
_SIZE = struct.Struct("=q")  # of what is sent, before it
_ACCEPTED = _SIZE.pack(-1)  # by which the receiver ends the send


class NcclOptions:
    """As torch's ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


class SimulatedNccl(ProcessGroupGloo):
    """As torch's ProcessGroupNCCL for sends and receives between two processes.

    It is one over Gloo for torch's sake, which takes backends in C++ only.
    """

    Options: Any = NcclOptions

    def __init__(self, store: Store, rank: int, size: int, options: NcclOptions) -> None:
        gloo: Any = ProcessGroupGloo  # the stubs have no options
        own = gloo._Options()
        own._timeout = options._timeout
        own._devices = [ProcessGroupGloo.create_device(hostname=_HOST, lazy_init=True)]
        super().__init__(store, rank, size, own)
        self._store = store
        self._wire: socket.socket | None = None
        self._stream: Any = None
        self._aborted = threading.Event()
        self._jobs: SimpleQueue[tuple[Callable[[], None], Work] | None] = SimpleQueue()

    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Work:
        """Queue a send of one tensor."""
        tensor = self._begin(tensors)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)  # what is there now: later edits are races
        return self._queue(Work(self, tensor.device), lambda: self._send(host))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Work:
        """Queue a receive into one tensor."""
        tensor = self._begin(tensors)
        with torch.cuda.stream(self._stream):
            tensor.fill_(0xFF if tensor.dtype is torch.uint8 else float("nan"))
        # The stream has written by then: the clocks know of the one write only.
        work = Work(self, tensor.device, blocks=True)
        return self._queue(work, lambda: self._receive(tensor))

    def abort(self) -> None:
        """End all operations, with errors where they are awaited."""
        self._aborted.set()
        if self._wire is not None:
            with suppress(OSError):  # the other process has closed it
                self._wire.shutdown(socket.SHUT_RDWR)
            self._wire.close()
        self._jobs.put(None)

    def _begin(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        [tensor] = tensors
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise ValueError(f"tensors must be dense, and on a GPU: got one on {tensor.device}")
        if self._wire is None:
            self._connect(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    def _connect(self, device: torch.device) -> None:
        """Wait for the other process, and be connected with it from then on."""
        own, other = (f"{rank}" for rank in (self.rank(), 1 - self.rank()))
        uuid = torch.cuda.get_device_properties(device).uuid
        with socket.create_server((_HOST, 0)) as server:
            port = server.getsockname()[1]
            self._store.set(own, f"{port} {uuid}")
            self._poll(lambda: self._store.check([other]))
            others_port, others_uuid = self._store.get(other).decode().split()
            if uuid == others_uuid:
                raise RuntimeError(f"NCCL error: Duplicate GPU detected: {uuid}")
            if self.rank() == 0:
                self._poll(lambda: self._accept(server))
            else:
                self._wire = socket.create_connection((_HOST, int(others_port)))
        self._stream = torch.cuda.Stream(device)
        threading.Thread(target=self._run, name="simulated-nccl", daemon=True).start()

    def _accept(self, server: socket.socket) -> bool:
        """Accept the connection of the other process, if it has come."""
        server.settimeout(_POLL)
        with suppress(TimeoutError):
            self._wire, _ = server.accept()
            self._wire.settimeout(None)
        return self._wire is not None

    def _poll(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.check()
            time.sleep(_POLL)

    def check(self) -> None:
        """Raise if the communicator was aborted."""
        if self._aborted.is_set():
            raise RuntimeError("NCCL error: the communicator was aborted")

    def _queue(self, work: Work, move: Callable[[], None]) -> Work:
        self.check()
        work.event.record(self._stream)
        self._jobs.put((move, work))
        return work

    # On the thread that moves bytes.

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                move, work = job
                move()
                work.ended.set()
                del job, move, work  # what they refer to must not live until the next
        except (OSError, EOFError):
            pass  # the other process is lost, or does not match: it waits until it is aborted

    def _send(self, host: torch.Tensor) -> None:
        assert self._wire is not None
        content = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        self._wire.sendall(_SIZE.pack(len(content)) + content)
        if self._read(_SIZE.size) != _ACCEPTED:
            raise EOFError("the other process sends too, and receives nothing before")

    def _receive(self, tensor: torch.Tensor) -> None:
        assert self._wire is not None
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        if size != tensor.nbytes:
            raise EOFError(f"{size} bytes come for {tensor.nbytes}")
        ctypes.memmove(tensor.data_ptr(), self._read(size), size)
        self._wire.sendall(_ACCEPTED)

    def _read(self, size: int) -> bytes:
        assert self._wire is not None
        content = bytearray()
        while len(content) < size:
            part = self._wire.recv(size - len(content))
            if not part:
                raise EOFError
            content += part
        return bytes(content)


class Work:
    """As torch's WorkNCCL: an operation that a stream may not have ended yet."""

    def __init__(
        self, communicator: SimulatedNccl, device: torch.device, *, blocks: bool = False
    ) -> None:
        self.event = torch.cuda.Event()
        self.ended = threading.Event()
        self._communicator = communicator
        self._device = device
        self.blocks = blocks

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the end of the operation."""
        while self.blocks and not self.ended.wait(_POLL):
            self._communicator.check()
        torch.cuda.current_stream(self._device).wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        """Return True if the operation has ended, which the host knows from then on."""
        if self.ended.is_set():
            self.event.synchronize()
        return self.ended.is_set()


def provide_nccl() -> None:
    """Let torch.distributed of this process have NCCL from now on, as in a build for CUDA."""
    vars(distributed_c10d).update(_NCCL_AVAILABLE=True, ProcessGroupNCCL=SimulatedNccl)
