"""Layers that the user divides among replicas by ``fully_shard``, as for ModelParallelStrategy.

FSDP2 gathers the parameters of a layer in a hook before its forward, drops them in one after it,
and reduces its gradients when autograd leaves the layer: in a pipeline for each micro-batch and
recomputation, in an order that differs by replica. ``sharding="parameters"`` gathers by the
schedule, and reduces once. So when ``configure_model`` returns, ``fully_shard`` is undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_gpipe.core.faithful import has_hooks
from lightning_gpipe.core.frontends import await_value, place_of_value
from lightning_gpipe.core.layout import fsdp_groups, fsdp_modules

_FLAGS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")  # for compilers
_FACTORS = ("gradient_divide_factor", "reduce_scatter_reduce_op")  # of some versions


@contextmanager
def undoing_fully_shard(root: nn.Module, mesh: DeviceMesh, *, divides: bool) -> Iterator[None]:
    """A ``with`` block after which no module in ``root`` is sharded by FSDP2 over ``mesh``.

    Parameters on the meta device keep the places of their values, in files or other processes.
    Raises a ValueError if the strategy would not divide what ``fully_shard`` divides.
    """
    named = root.named_parameters(remove_duplicate=False)
    places = {name: place_of_value(parameter) for name, parameter in named}
    yield
    modules = fsdp_modules(root)
    if not modules:  # a pipeline refuses shards over other processes
        return
    for each in modules.values():
        each.reshard()
    _check(modules, mesh, divides=divides)
    for each in modules.values():
        _undo(each)
    made: dict[int, tuple[DTensor, nn.Parameter]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor) and parameter.device_mesh == mesh:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, _whole(parameter, mesh.get_group())
                whole = made[id(parameter)][1]
                place = place_of_value(parameter) or places.get(f"{prefix}.{name}".lstrip("."))
                if place is not None and whole.is_meta:
                    await_value(whole, place)
                setattr(module, name, whole)


def _check(modules: dict[str, Any], mesh: DeviceMesh, *, divides: bool) -> None:
    """Refuse what ``fully_shard`` asks for, and a pipeline that divides parameters cannot do."""
    if mesh.size() > 1 and not divides:
        raise ValueError(
            "fully_shard in configure_model divides parameters among replicas, which a pipeline "
            "does by its schedule: got a strategy without. Write "
            "GPipeStrategy(sharding='parameters')."
        )
    found = dict.fromkeys(
        f"{fault} of {name or type(module).__name__}"
        for name, module in modules.items()
        for fault in _faults(module, mesh)
    )
    if found:
        raise ValueError(
            "fully_shard in configure_model may divide new layers over "
            "self.device_mesh['data_parallel'], for a pipeline that gathers and averages by its "
            f"schedule: got {', '.join(found)}. Write fully_shard(layer, "
            "mesh=self.device_mesh['data_parallel']), and Trainer(precision=...) for other dtypes."
        )


def _faults(module: Any, mesh: DeviceMesh) -> Iterator[str]:
    state, groups = module._get_fsdp_state(), fsdp_groups(module)
    policy = state._mp_policy
    if any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype)):
        yield f"mp_policy={policy}"
    if state._is_root is not None:
        yield "a forward by itself"
    for group in groups:
        if any(vars(group).get(name) is not None for name in _FACTORS):
            yield "a factor for gradients"
        for each in group.fsdp_params:
            if each.offload_to_cpu:
                yield "an offload_policy"
            if each.sharded_param.device_mesh != mesh:
                yield f"mesh={each.sharded_param.device_mesh}"
            if has_hooks(each.sharded_param):
                yield "hooks on gradients"


def _undo(module: Any) -> None:
    # Not before FSDP2 itself is imported, which takes a while.
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in fsdp_groups(module):
        for each in group.fsdp_params:
            each._post_load_hook_handle.remove()
    module.__class__ = type(module).__mro__[2]  # after those that FSDP2 has put before it
    states, registry = (vars(module).get(key, {}) for key in (STATE_KEY, REGISTRY_KEY))
    for api in [api for api, of_api in states.items() if of_api is state]:
        del states[api]
        del registry[api.__name__]
    _module_state_mapping.pop(module, None)
    for each in module.modules():
        for name in _FLAGS:
            vars(each).pop(name, None)


def _whole(parameter: DTensor, group: ProcessGroup) -> nn.Parameter:
    """Return the whole parameter of a shard, in the memory of the host.

    Not by ``full_tensor()``, since DTensor's caches keep the groups of an earlier Trainer.
    """
    (placement,) = parameter.placements
    assert isinstance(placement, Shard), "fully_shard divides along a dimension"
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    if not parameter.is_meta:
        local = parameter.to_local().detach()
        chunks = value.chunk(group.size(), placement.dim)  # fewer, if there are few rows
        parts = [torch.empty_like(chunk, device=local.device) for chunk in chunks]
        for rank, part in enumerate(parts):
            if rank == group.rank():
                part.copy_(local)
            dist.broadcast(part, group=group, group_src=rank)
        value = torch.cat(parts, placement.dim).cpu()
    return nn.Parameter(value, parameter.requires_grad)
