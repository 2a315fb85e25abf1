"""PyTorch's FSDP2 with its weights on the host, in one process: what others do on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.contestants.task import Task, stepping
from benchmarks.harness import Contestant


@contextmanager
def offloaded(task: Task, *, chunks: int, device: str, name: str) -> Iterator[Contestant]:
    """Layers that are recomputed, each a group of its own, micro-batch after micro-batch.

    The gradients of a mini-batch are added up on the device, and go to the host after the last
    micro-batch; weights come for each forward and for each backward.
    """
    place = torch.device(device)
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    try:
        module = task.copy_of_module().cpu()
        mesh = init_device_mesh(place.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=place.type == "cuda")
        root = nn.Sequential(*map(checkpoint_wrapper, module))
        for group in (*root, root):
            fully_shard(group, mesh=mesh, offload_policy=policy)
        yield _training(task, root, chunks, name)
    finally:
        dist.destroy_process_group()


def _training(task: Task, root: nn.Sequential, chunks: int, name: str) -> Contestant:
    def step() -> None:
        root.zero_grad()
        rows = zip(task.x.chunk(chunks), task.target.chunk(chunks), strict=True)
        for i, (x, target) in enumerate(rows):
            root.set_requires_gradient_sync(i == chunks - 1)  # type: ignore[operator]
            (task.loss(root(x), target) / chunks).backward()

    def gradients() -> list[Tensor]:
        return [each.to_local() for each in whole.gradients() if isinstance(each, DTensor)]

    whole = stepping(name, step, list(root.parameters()))
    return replace(whole, gradients=gradients)
