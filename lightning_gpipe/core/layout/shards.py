"""Refuses layers whose parameters are shards of tensors over processes.

FSDP2 gives a layer its whole parameters in a hook before its forward. By then a stage has put
leaves of its own in their place: the gradients of the whole parameters would never arrive. A
pipeline that is sharded as a whole gets its parameters before, and works; so do the modules around.

Layers that compute with shards, by ``parallelize_module``, need no whole parameters. All processes
with shards of a stage must run the same actions in the same order, as a strategy with
``tensor_parallel`` arranges; the name of their dimension of its mesh tells.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NAMED = 16  # in a message; of more, the others are counted
_FSDP = "torch.distributed.fsdp"
TENSOR_PARALLEL = "tensor_parallel"  # the dimension of a mesh


def has_shards(modules: Iterable[nn.Module], parameters: Collection[nn.Parameter]) -> bool:
    """Return True if FSDP2 shards a module, or a parameter is a DTensor of another mesh.

    FSDP2 may have left the whole parameters in a module, so that it has no DTensors for now.
    """
    fsdp = _fsdp()
    if fsdp and any(issubclass(kind, fsdp) for kind in set(map(type, modules))):
        return True
    plain = {nn.Parameter}.issuperset(map(type, parameters))  # most often
    return not plain and any(map(_is_shard, parameters))


def check_whole(
    layers: Iterable[tuple[str, nn.Module]], error: type[Exception] = TypeError
) -> None:
    """Refuse layers that have shards; each comes with the prefix of its parameters' names."""
    names = [name for prefix, layer in layers for name in _shards_in(prefix, layer)]
    if names:
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        raise error(
            "parameters of layers in a pipeline must be whole: got the shards (DTensor) "
            f"{', '.join(names[:_NAMED])}{others}, which would get no gradients. Leave fully_shard "
            "and parallelize_module out. GPipeStrategy(replicas=...) trains several pipelines "
            "together; fully_shard(pipeline), of a GPipe as a whole, shards what it has between "
            "its calls. In configure_model(), with GPipeStrategy(sharding='parameters'), "
            "fully_shard may divide layers over self.device_mesh['data_parallel'], and with "
            "GPipeStrategy(tensor_parallel=...), parallelize_module over "
            "self.device_mesh['tensor_parallel']."
        )


def check_order(layers: Iterable[nn.Module]) -> None:
    """Refuse layers divided among processes on threads, which run them in no common order."""
    parameters = [x for layer in layers for x in layer.parameters() if isinstance(x, DTensor)]
    if any(not _is_shard(x) and x.device_mesh.size() > 1 for x in parameters):
        raise TypeError(
            "layers that parallelize_module divides must run in the same order in all processes of "
            "a stage: got several devices with a thread each. Write "
            "GPipeStrategy(processes='per_stage', tensor_parallel=...), or threads=False."
        )


def fsdp_modules(root: nn.Module) -> dict[str, Any]:
    """Return the modules in ``root`` that FSDP2 shards, by name."""
    return {name: each for name, each in root.named_modules() if isinstance(each, _fsdp())}


def fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of parameters of a module that FSDP2 shards."""
    state = module._get_fsdp_state()
    several: list[Any] | None = vars(state).get("_fsdp_param_groups")  # in newer versions
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _shards_in(prefix: str, layer: nn.Module) -> list[str]:
    fsdp = _fsdp()
    sharded = [module for module in layer.modules() if isinstance(module, fsdp)]
    ids = {id(parameter) for module in sharded for parameter in module.parameters()}
    return [
        name
        for name, parameter in layer.named_parameters(prefix=prefix)
        if id(parameter) in ids or _is_shard(parameter)
    ]


def _is_shard(parameter: Tensor | None) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return parameter.device_mesh.mesh_dim_names != (TENSOR_PARALLEL,)


def _fsdp() -> tuple[type, ...]:
    """The class of sharded modules, if it has been imported: else there is no object of it."""
    return (sys.modules[_FSDP].FSDPModule,) if _FSDP in sys.modules else ()
