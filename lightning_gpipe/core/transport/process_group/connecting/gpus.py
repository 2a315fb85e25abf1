"""The GPU that each worker has: tensors go straight between two GPUs of two processes.

NCCL connects no GPU with itself, as where two processes share one, nor two parts of one (MIG).
There, and without NCCL, tensors go through the memory of the hosts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_gpipe.core.transport.process_group.connecting.rendezvous import call_with_timeout
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair

_PART_OF_A_GPU = " MIG "  # in its name


class Gpu(NamedTuple):
    """A GPU, by its number in the process that uses it, and by a name that no other GPU has."""

    number: int
    uuid: str

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """Return the GPU of a device, or None if NCCL does not connect it."""
        if device.type != "cuda":
            return None
        number = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(number)
        return None if _PART_OF_A_GPU in properties.name else cls(number, str(properties.uuid))


class GpuTable:
    """The GPUs of the workers; each process writes its own, and reads others' when needed."""

    def __init__(
        self, store: Store, devices: Mapping[int, torch.device], lost_after: timedelta
    ) -> None:
        self._store = store
        self._lost_after = lost_after
        self._by_worker = {worker: Gpu.of(device) for worker, device in devices.items()}
        self._pairs: dict[tuple[torch.device, int], GpuPair | None] = {}
        for worker, gpu in self._by_worker.items():
            store.set(str(worker), json.dumps(gpu))

    def pair(self, device: torch.device, worker: int) -> GpuPair | None:
        key = device, worker
        if key not in self._pairs:
            self._pairs[key] = self._pair_of(Gpu.of(device), worker)
        return self._pairs[key]

    def _pair_of(self, source: Gpu | None, worker: int) -> GpuPair | None:
        target = self._gpu_of(worker)
        if source is None or target is None or source.uuid == target.uuid:
            return None
        return source.number, target.number

    def _gpu_of(self, worker: int) -> Gpu | None:
        if worker not in self._by_worker:
            message = f"a process must tell the GPU of its worker: worker {worker} did not"
            read = partial(self._store.get, str(worker))
            written = json.loads(call_with_timeout(self._lost_after, read, message))
            self._by_worker[worker] = None if written is None else Gpu(*written)
        return self._by_worker[worker]


def over_nccl(group: dist.ProcessGroup | None) -> bool:
    """Return True if a process group sends tensors of GPUs over NCCL."""
    return "cuda:nccl" in dist.get_backend_config(group).split(",")
