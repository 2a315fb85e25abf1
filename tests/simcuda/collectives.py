"""Simulated collectives between simulated GPUs, ordered with other work as NCCL's are.

A collective is queued on a stream of its group, after what the caller's current stream has queued,
and uses the memory there; ``work.wait()`` lets the current stream wait for its end. So a result
that is not waited for, and memory that is freed or edited meanwhile, are hazards. The bytes go over
Gloo, for which the host waits at once, where NCCL's processes wait on the device.

They replace the operators of c10d for GPUs, so that all collectives have them in whatever way they
are called, those of DTensors too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map

_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
_running: set[Collective] = set()  # C++ does not keep the objects of Python


class Collective(dist.Work):
    """A collective that a stream may not have ended yet.

    It keeps its tensors until it is waited for.
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._device = stream.device
        self._tensors = tensors
        self._event = stream.record_event()
        _running.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        _running.discard(self)
        return True

    def is_completed(self) -> bool:
        """Return True, which the host knows from then on."""
        self._event.synchronize()
        return True


def _on_host(name: str, *args: Any) -> Any:
    """Run an operator of c10d on the host, with copies that streams order as they would order it.

    It writes its first argument, but for a root that only sends, and what only sends to a root.
    """
    group = next(ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
    written = tree_leaves(args[0])
    if name in _ROOTS and (group.rank() == args[_ROOTS[name]]) == (name == "broadcast_"):
        written = []
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    device = tensors[0].device
    key = group.group_name, device
    stream = _streams.setdefault(key, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for x in tensors:
                # NCCL averages integers, and Gloo does not.
                exact = name.startswith("allreduce_") and x.dtype is torch.int64
                host = torch.empty(x.shape, dtype=torch.float64 if exact else x.dtype)
                copies[id(x)] = host.copy_(x, non_blocking=True)
        found = getattr(torch.ops.c10d, name)(*tree_map(lambda x: copies.get(id(x), x), args))
        dist.Work.unbox(found[1] if isinstance(found, tuple) else found).wait()
        with torch.cuda.stream(stream):
            for x in written:
                x.copy_(copies[id(x)], non_blocking=True)
    work = Collective(stream, tensors).boxed()
    return (args[0], work) if isinstance(found, tuple) else work


_ROOTS = {"broadcast_": 2, "reduce_": 3}  # the place among the arguments
_OPERATORS = (
    *_ROOTS,
    "allreduce_",
    "allgather_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "scatter_",
    "allreduce_coalesced_",  # these are the functional ones
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)


def provide_collectives() -> None:
    """Let the collectives of this process take tensors of simulated GPUs from now on."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are kernels, which ask a backend for GPUs
        for name in _OPERATORS:
            library.impl(name, partial(_on_host, name), "CUDA", allow_override=True)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []  # which take their operators with them
