"""Replicas of a pipeline, whose gradients PyTorch's DistributedDataParallel averages.

Its parameters may be on several devices; those of other processes' stages, on meta, are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed import (  # type: ignore[attr-defined]  # not in the stubs
    ProcessGroup,
    _broadcast_coalesced,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gpipe.core.data import shard_of

_OWN = {"self", "module", "device_ids", "output_device", "dim", "process_group", "device_mesh"}
_BUCKET = 250 * 2**20  # bytes that are sent at a time, as DistributedDataParallel does


# Options with which gradients of stages may be averaged without the wrapper.
_EARLY = {"broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view", "init_sync"}


def leaves_early(ddp: Mapping[str, Any], wrapper: nn.Module) -> bool:
    """Return True if gradients of stages may leave early, by the options of the wrapper."""
    return ddp.keys() <= _EARLY and not getattr(wrapper, "_comm_hooks", None)


def bucket_bytes(ddp: Mapping[str, Any]) -> float:
    """Return the bytes of a bucket."""
    return float(ddp.get("bucket_cap_mb") or 25) * 2**20


def check_options(ddp: Mapping[str, Any] | None, replicas: int, *, wraps: bool) -> None:
    """Raise ValueError for options that a wrapper, if any, does not have, or without effect."""
    supported = set(inspect.signature(DistributedDataParallel.__init__).parameters) - _OWN
    if ddp is not None and replicas == 1:
        raise ValueError(
            f"ddp has options for replicas of the pipeline: got ddp={ddp!r} with replicas=1. "
            "Write replicas=2 or more, or leave ddp out."
        )
    if unknown := sorted(set(ddp or ()) - supported):
        raise ValueError(
            f"ddp must have options of DistributedDataParallel: got {', '.join(unknown)}. Known "
            f"are {', '.join(sorted(supported))}."
        )
    if not wraps and (others := sorted(set(ddp or ()) - _EARLY)):
        raise ValueError(
            "divided gradients are averaged without DistributedDataParallel, also where a "
            f"parameter has none: got ddp with {', '.join(others)}. Leave it out; there are "
            f"{', '.join(sorted(_EARLY))}."
        )


def check_static_graph(
    ddp: Mapping[str, Any], callbacks: Iterable[Callback], accumulated: int, *, automatic: bool
) -> None:
    """Raise ValueError for a static graph if some backwards average no gradients."""
    if not ddp.get("static_graph"):
        return
    reasons = [f"accumulate_grad_batches={accumulated}"] if accumulated > 1 else []
    kind = GradientAccumulationScheduler
    reasons += [kind.__name__ for each in callbacks if isinstance(each, kind)]
    reasons += [] if automatic else ["automatic_optimization=False"]
    if reasons:
        raise ValueError(
            "ddp={'static_graph': True} needs steps that are all alike, each with one backward "
            f"that averages the gradients: got {', '.join(reasons)}. Leave out static_graph."
        )


def replicated(
    module: nn.Module,
    group: ProcessGroup,
    options: Mapping[str, Any],
    averaged: Collection[nn.Parameter] = (),
) -> DistributedDataParallel | None:
    """Give all replicas the values of the first, and wrap a model that averages their gradients.

    The ``group`` has the same stages. None if all that need gradients are ``averaged`` otherwise.
    """
    ids = set(map(id, averaged))
    rest = (each for each in module.parameters() if each.requires_grad and id(each) not in ids)
    wraps = not all(each.is_meta for each in rest)
    if not wraps or (ids and options.get("init_sync", True)):
        equalise(module, group)
    if not wraps:
        return None
    ignored = _names(module, lambda tensor: tensor.is_meta or id(tensor) in ids)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    try:
        return DistributedDataParallel(module, process_group=group, **options)
    finally:
        del module._ddp_params_and_buffers_to_ignore


def equalise(module: nn.Module, group: ProcessGroup, *, shards: bool = True) -> None:
    """Give all replicas the first one's values or, without ``shards``, those of whole tensors."""
    tensors = chain(module.parameters(), module.buffers())
    _equalise((x for x in tensors if shards or _is_whole(x)), group)


def equalise_buffers(module: nn.Module, group: ProcessGroup) -> None:
    """Give all replicas the buffers of the first, as the wrapper does before a forward."""
    _equalise(module.buffers(), group)


def _equalise(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    if same := [shard_of(x.detach()) for x in tensors if not x.is_meta]:
        _broadcast_coalesced(group, same, _BUCKET, 0)


def gathered(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return the tensor of each process of a group."""
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def gathered_with_gradients(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """Return the tensors of all processes of a group, one after another in a new first dim.

    Not by ``torch.distributed.nn``, whose backward over Gloo takes places in a group for ranks.
    """
    stacked: Tensor = _Gathered.apply(tensor, group)
    return stacked


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return torch.stack(gathered(group, tensor.contiguous()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def _is_whole(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or all(x.is_replicate() for x in tensor.placements)


def _names(module: nn.Module, includes: Callable[[Tensor], bool]) -> list[str]:
    """Return the names of some tensors, in the forms that the wrapper compares."""
    names = []
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in chain(owner._parameters.items(), owner._buffers.items()):
            if tensor is not None and includes(tensor):
                names += [f"{path}.{name}", f"{path}.{name}".removeprefix(".")]
    return names
