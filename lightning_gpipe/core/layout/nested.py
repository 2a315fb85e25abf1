"""The layers of an nn.Sequential, those of nested ones counted one by one.

A group is a child that only runs its layers: a plain nn.Sequential without parameters, buffers or
hooks of its own. It is only a name, and is not called; its layers count in its place, under their
paths in the module::

    Sequential( Sequential(a, b), c )     0.0: a   0.1: b   1: c

If a layer is in several places, the children count, because a layer is on one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from types import MethodType
from typing import Any, TypeGuard

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layers_of(module: nn.Sequential) -> dict[str, nn.Module]:
    """Return the layers of an nn.Sequential by their paths in it."""
    layers = dict(_unfolded(module, ""))
    return layers if len(set(layers.values())) == len(layers) else dict(_children(module))


def groups_of(module: nn.Sequential) -> dict[str, nn.Module]:
    """Return the groups in an nn.Sequential by their paths in it."""
    parents = [path.split(".")[:-1] for path in layers_of(module)]
    paths = dict.fromkeys(path for names in parents for path in accumulate(names, "{}.{}".format))
    return {path: module.get_submodule(path) for path in paths}


def balance_of_layers(module: nn.Sequential, balance: Sequence[int]) -> Sequence[int]:
    """Return a balance of layers; one that counts the children of an nn.Sequential is converted.

    Since every group has a layer, both counts are equal only if both mean the same cut.
    """
    ints = isinstance(balance, list | tuple) and all(type(n) is int and n > 0 for n in balance)
    if not ints or sum(balance) != len(module):
        return balance
    sizes = iter(Counter(path.partition(".")[0] for path in layers_of(module)).values())
    return [sum(islice(sizes, children)) for children in balance]


def is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return True for an nn.Sequential that only runs its layers in order."""
    return isinstance(module, nn.Sequential) and all(
        getattr(type(module), name) is getattr(nn.Sequential, name)
        for name in ("forward", "__iter__")
    )


def has_own_forward(module: nn.Module) -> bool:
    """Return True if a ``forward`` other than that of its class was assigned to this object."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, MethodType):  # in a copy of a module that ran as a pipeline
        return forward.__func__ is not type(module).forward
    return forward is not None


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return a module's dicts of hooks, empty or not."""
    return [vars(module)[name] for name in _HOOKS]


def _unfolded(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in _children(module):
        if _is_group(child):
            yield from _unfolded(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children with their names; one that is there twice, twice."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def _is_group(module: nn.Module) -> bool:
    return (
        is_plain(module)
        and type(module).__call__ is nn.Sequential.__call__
        and len(module) > 0
        and not has_own_forward(module)
        and module._compiled_call_impl is None
        and not any([module._parameters, module._buffers, *hooks_of(module)])
    )
