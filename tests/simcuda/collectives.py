"""Simulated collectives between simulated GPUs, ordered with other work as NCCL's are.

A collective is queued on a stream of its group, after what the caller's current stream has queued,
and uses the memory there; ``work.wait()`` lets the current stream wait for its end. So a result
that is not waited for, and memory that is freed or edited meanwhile, are hazards. The bytes go over
Gloo, for which the host waits at once, where NCCL's processes wait on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

_STREAMS: dict[tuple[Any, torch.device], torch.cuda.Stream] = {}


class Collective:
    """As torch's Work: a collective that a stream may not have ended yet.

    It keeps its tensors until it is waited for.
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self._device = stream.device
        self._tensors = tensors
        self._event = stream.record_event()

    def wait(self) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        """Return True, which the host knows from then on."""
        self._event.synchronize()
        return True


def _run(
    collective: Callable[..., Any],
    sent: Tensor,
    results: Sequence[Tensor],
    options: dict[str, Any],
    *,
    as_list: bool = False,
) -> Collective | None:
    """Run a collective on the host, with copies that streams order as they would order it."""
    in_background = options.pop("async_op", False)
    key = options["group"], sent.device
    stream = _STREAMS.setdefault(key, torch.cuda.Stream(sent.device))
    stream.wait_stream(torch.cuda.current_stream(sent.device))
    host = torch.empty(sent.shape, dtype=sent.dtype)
    with torch.cuda.stream(stream):
        host.copy_(sent, non_blocking=True)
    on_host = [torch.empty_like(host) for _ in results] if as_list else [host]
    collective(on_host if as_list else host, *([host] if as_list else []), **options)
    with torch.cuda.stream(stream):
        for result, value in zip(results, on_host, strict=False):
            result.copy_(value, non_blocking=True)
    work = Collective(stream, [sent, *results])
    if in_background:
        return work
    work.wait()
    return None


@contextmanager
def simulated_collectives() -> Iterator[None]:
    """Let the collectives of torch.distributed take tensors of simulated GPUs in a block."""
    broadcast, reduce, all_reduce = dist.broadcast, dist.reduce, dist.all_reduce
    all_gather = dist.all_gather

    def sent_to_all(tensor: Tensor, **options: Any) -> Any:
        if not tensor.is_cuda:
            return broadcast(tensor, **options)
        receives = options["group"].rank() != options["group_src"]
        return _run(broadcast, tensor, [tensor] * receives, options)

    def reduced(tensor: Tensor, **options: Any) -> Any:
        if not tensor.is_cuda:
            return reduce(tensor, **options)
        receives = options["group"].rank() == options["group_dst"]
        return _run(reduce, tensor, [tensor] * receives, options)

    def reduced_to_all(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not tensor.is_cuda:
            return all_reduce(tensor, *args, **options)
        return _run(all_reduce, tensor, [tensor], options)

    def gathered(tensors: list[Tensor], tensor: Tensor, **options: Any) -> Any:
        if not tensor.is_cuda:
            return all_gather(tensors, tensor, **options)
        return _run(all_gather, tensor, tensors, options, as_list=True)

    with patch.multiple(
        dist, broadcast=sent_to_all, reduce=reduced, all_reduce=reduced_to_all, all_gather=gathered
    ):
        yield
