"""A model that ``from_pretrained(device_map=...)`` of transformers has spread over devices.

The library accelerate gives its modules hooks that move inputs from device to device. In a pipeline
the stages do that, so the hooks are removed; weights stay where they are if the balance allows.
"""

from __future__ import annotations

from torch import nn

from lightning_gpipe.core.frontends.stored import first_few

# The attributes that accelerate sets on a module beside its forward.
_HOOK, _FORWARD, _MAP = "_hf_hook", "_old_forward", "hf_device_map"
_GUARDS = ("to", "cuda")  # which warn that the model has hooks
_ALIGNS = "AlignDevicesHook"  # the class of hooks that move inputs and outputs, and nothing else


def remove_dispatch_hooks(root: nn.Module) -> None:
    """Remove the hooks that spread a model over devices, for good, if it has such hooks."""
    hooked = {name: module for name, module in root.named_modules() if _HOOK in vars(module)}
    if not hooked:
        return
    _check(hooked)
    for module in hooked.values():
        _remove_hook(module)
    for module in root.modules():
        if vars(module).pop(_MAP, None) is not None:
            for name in _GUARDS:
                vars(module).pop(name, None)


def _check(hooked: dict[str, nn.Module]) -> None:
    away = [
        f"{name}.{own}".strip(".")
        for name, module in hooked.items()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    if away:
        raise ValueError(
            "all weights of a model must be on devices: from_pretrained(device_map=...) has "
            f"offloaded {first_few(away)}. Build the model under parameters_on_meta() of "
            "lightning_gpipe.pretrained instead, and give it its weights by load_pretrained()."
        )
    hooks = [(name, vars(module)[_HOOK]) for name, module in hooked.items()]
    others = [
        f"{type(part).__name__} on {name or 'the model'}"
        for name, hook in hooks
        for part in vars(hook).get("hooks", [hook])  # of a sequential hook
        if type(part).__name__ != _ALIGNS
    ]
    if others:
        raise ValueError(
            "hooks of accelerate must only move inputs to devices, as a pipeline does itself: got "
            f"{first_few(others)}. Take them off: "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )


def _remove_hook(module: nn.Module) -> None:
    slots = vars(module)
    slots.pop(_HOOK)
    forward = slots.pop(_FORWARD, None)
    slots.pop("forward", None)
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        slots["forward"] = forward  # one of the user's own
