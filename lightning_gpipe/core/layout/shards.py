"""Refuses layers whose parameters are shards of tensors over processes.

FSDP2 gives a layer its whole parameters in a hook before its forward. By then a stage has put
leaves of its own in their place, which collect the gradients of a mini-batch: those of the whole
parameters would never arrive. A pipeline that is sharded as a whole gets its parameters before, and
works; so do the modules around the layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

_NAMED = 16  # in a message; of more, the others are counted
_KINDS = ("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed.tensor", "DTensor")


def has_shards(modules: Iterable[nn.Module]) -> bool:
    """Return True if FSDP2 shards one of these modules, or one has DTensors; written for speed.

    FSDP2 may have left the whole parameters in a module, so that it has no DTensors for now.
    """
    kinds = _kinds()
    for module in modules:
        if isinstance(module, kinds):
            return True
        for parameter in module._parameters.values():
            if type(parameter) is not nn.Parameter and isinstance(parameter, kinds):
                return True
    return False


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
            "its calls."
        )


def _shards_in(prefix: str, layer: nn.Module) -> list[str]:
    kinds = _kinds()
    sharded = [module for module in layer.modules() if isinstance(module, kinds)]
    ids = {id(parameter) for module in sharded for parameter in module.parameters()}
    return [
        name
        for name, parameter in layer.named_parameters(prefix=prefix)
        if id(parameter) in ids or isinstance(parameter, kinds)
    ]


def _kinds() -> tuple[type, ...]:
    """The classes of shards that have been imported: without that there is no object of them."""
    imported = [(sys.modules[module], name) for module, name in _KINDS if module in sys.modules]
    return tuple(getattr(module, name) for module, name in imported)
