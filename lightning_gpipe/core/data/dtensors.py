"""Tensors of which each process of a stage has a shard, by ``parallelize_module``.

Operations on a DTensor communicate where they must, in all its processes. To another stage, a sum
over replicas or a file goes the shard of this process, or the whole tensor.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def shard_of(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor in this process, in the same memory; else the tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def from_shard(shard: Tensor, like: Tensor) -> Tensor:
    """Return a tensor divided as another one, with this shard; the shard if that is no DTensor."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def is_uneven(tensor: Tensor) -> bool:
    """Return whether processes have shards of different sizes of a DTensor."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, Shard) and tensor.shape[placement.dim] % tensor.device_mesh.size(k)
        for k, placement in enumerate(tensor.placements)
    )


def whole_of(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, in all its processes; else the tensor."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def from_whole(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor divided like another one of the same shape; one of another shape is whole."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor) or not whole.dim():
        return whole
    mesh, placements = like.device_mesh, like.placements
    if whole.shape != like.shape:
        placements = (Replicate(),) * mesh.ndim
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def divided_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient divided as its parameter: addends in the processes are added up."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements).detach()
