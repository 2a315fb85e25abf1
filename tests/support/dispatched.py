"""Hooks like those of accelerate on a model that ``from_pretrained(device_map=...)`` spreads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class AlignDevicesHook:
    """Moves the inputs of a module to a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls = 0

    def pre_forward(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        return tuple(x.to(self.device) if isinstance(x, torch.Tensor) else x for x in args)


def dispatch(model: Any, device_map: Mapping[str, str], kind: Any = AlignDevicesHook) -> list[Any]:
    """Move the parts to their devices, and give each a hook.

    Returns:
        The hooks.
    """
    hooks = []
    for name, device in device_map.items():
        module: Any = model.get_submodule(name).to(device)
        hook = kind(device)
        module._old_forward, module._hf_hook = module.forward, hook
        module.forward = functools.update_wrapper(
            functools.partial(_forward, module), module._old_forward
        )
        hooks.append(hook)
    model.hf_device_map = dict(device_map)
    model.to = functools.update_wrapper(functools.partial(_refused), nn.Module.to)
    return hooks


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._old_forward(*module._hf_hook.pre_forward(args), **kwargs)


def _refused(*_: Any) -> None:
    raise AssertionError("a model with hooks must not be moved")
