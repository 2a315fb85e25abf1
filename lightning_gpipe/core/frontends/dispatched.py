"""A model that ``from_pretrained(device_map=...)`` of transformers has spread over devices.

The library accelerate gives its modules hooks that move the input of each to the device of its
weights, one device after another. In a pipeline the stages do that, so the hooks are taken off; the
weights stay where they are if the balance puts them there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_gpipe.core.frontends.stored import shortened

# What accelerate sets on a module beside its forward.
_HOOK, _FORWARD, _MAP = "_hf_hook", "_old_forward", "hf_device_map"
_GUARDS = ("to", "cuda")  # which warn that the model has hooks
_ALIGNS = "AlignDevicesHook"  # the class of hooks that move inputs and outputs, and nothing else


class Spread:
    """Where the weights of a model were when its hooks were taken off.

    Args:
        root: The model.
        parts: The names of its parts in the map of devices.
    """

    def __init__(self, root: nn.Module, parts: list[str]) -> None:
        modules = dict(root.named_modules())
        self._parts = {part: list(modules[part].parameters()) for part in parts if part in modules}
        self._devices = {
            part: [parameter.device for parameter in parameters]
            for part, parameters in self._parts.items()
        }

    @property
    def moved(self) -> list[str]:
        """The parts that are elsewhere now, with their devices."""
        found = []
        for part, parameters in self._parts.items():
            for parameter, before in zip(parameters, self._devices[part], strict=True):
                if parameter.device != before:
                    found.append(f"{part} ({before} to {parameter.device})")
                    break
        return found

    def __str__(self) -> str:
        if not self.moved:
            return "What from_pretrained(device_map=...) has spread stays where it is."
        return (
            f"What from_pretrained(device_map=...) has spread is moved: {shortened(self.moved)}. A "
            "device_map with these devices, or load_pretrained(), puts it there at once."
        )


def undispatch(root: nn.Module) -> Spread | None:
    """Take off the hooks that spread a model over devices, for good.

    Returns:
        Where its weights are; None if there are no such hooks.

    Raises:
        ValueError: If a hook does more than to move inputs, or weights were offloaded.
    """
    hooked = {name: each for name, each in root.named_modules() if _HOOK in vars(each)}
    if not hooked:
        return None
    _check_offloaded(hooked)
    _check_hooks(hooked)
    parts = [
        f"{path}.{part}".strip(".")
        for path, module in root.named_modules()
        for part in vars(module).get(_MAP, ())
    ]
    spread = Spread(root, parts)
    for module in hooked.values():
        _take_off(module)
    for module in root.modules():
        if vars(module).pop(_MAP, None) is not None:
            for name in _GUARDS:
                vars(module).pop(name, None)
    return spread


def _check_offloaded(hooked: dict[str, nn.Module]) -> None:
    away = [
        f"{name}.{own}".strip(".")
        for name, module in hooked.items()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    if away:
        raise ValueError(
            "all weights of a model must be on devices: from_pretrained(device_map=...) has "
            f"offloaded {shortened(away)}. Build the model under parameters_on_meta() of "
            "lightning_gpipe.pretrained instead, and give it its weights by load_pretrained()."
        )


def _check_hooks(hooked: dict[str, nn.Module]) -> None:
    others = [
        f"{type(hook).__name__} on {name or 'the model'}"
        for name, module in hooked.items()
        for hook in _hooks_in(vars(module)[_HOOK])
        if type(hook).__name__ != _ALIGNS
    ]
    if others:
        raise ValueError(
            "hooks of accelerate must only move inputs to devices, as a pipeline does itself: got "
            f"{shortened(others)}. Take them off: "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )


def _hooks_in(hook: Any) -> list[Any]:
    """The hooks that a sequential hook consists of, or the one hook."""
    return list(vars(hook).get("hooks", [hook]))


def _take_off(module: nn.Module) -> None:
    slots = vars(module)
    slots.pop(_HOOK)
    forward = slots.pop(_FORWARD, None)
    slots.pop("forward", None)
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        slots["forward"] = forward  # one of the user's own
