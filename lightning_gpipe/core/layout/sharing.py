"""Sharing between stages, and with modules outside of the pipeline.

Stages run at the same time, each on its device. So a module or a generator of several stages, and a
buffer of several devices that layers change, are refused. A parameter can be shared: it is on one
device, its home, and stages on other devices follow it with copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.data import has_own_dispatch
from lightning_gpipe.core.layout.layout import HOST, META, Layout
from lightning_gpipe.core.layout.module_attributes import (
    Slot,
    attributes_in,
    is_generator,
    tensors_within,
    within,
)


def check_sharing(layout: Layout) -> None:
    """Refuse modules and generators of several stages, and buffers of several devices."""
    first_users: dict[int, tuple[int, str]] = {}  # by id: not all generators are hashable
    faults: dict[str, None] = {}
    places = [(layout.owner_of(j), layout.device_of(j)) for j in range(layout.n)]
    for j, partition in enumerate(layout.partitions):
        for k, layer in zip(partition.indices, partition.layers, strict=True):
            for kind, name, value in _unshared(layer):
                path = f"layer {k}{'.' + name if name else ''}"
                first, where = first_users.setdefault(id(value), (j, path))
                on_device = kind == "buffer"  # stages of one device may share it
                if places[first] != places[j] if on_device else first != j:
                    there, here = (
                        layout.where(stage) if on_device else f"stage {stage}"
                        for stage in (first, j)
                    )
                    faults[f"{kind} {where} ({there}) is {path} ({here})"] = None
    if faults:
        raise ValueError(
            "stages must not share modules or generators, nor buffers across devices: got "
            f"{'; '.join(faults)}. Choose a balance that puts these layers into one stage, or do "
            "not share them."
        )


def check_outside(
    root: nn.Module, inner: Collection[nn.Module], layout: Layout, root_device: torch.device
) -> None:
    """Refuse buffers of a stage that a module of ``root`` outside of ``inner`` has elsewhere."""
    owners = {
        buffer: partition.index
        for partition in layout.partitions
        for layer in partition.layers
        for buffer in layer.buffers()
    }
    faults = []
    for path, module in root.named_modules(memo={*inner}):
        for name, buffer in module.named_buffers(path, recurse=False):
            j = owners.get(buffer)
            if j is not None and (layout.spread or layout.device_of(j) != root_device):
                faults.append(f"{name} ({root_device}) is in stage {j} ({layout.where(j)})")
    if faults:
        raise ValueError(
            "a stage must not share buffers with a module on another device: got "
            f"{'; '.join(faults)}. What is outside of the pipeline is on {root_device}: choose a "
            "balance that puts these layers into a stage there, or do not share them."
        )


def shared_with_outside(root: nn.Module, inner: Collection[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of ``inner`` modules that others have too."""
    inside = {parameter for module in inner for parameter in module.parameters()}
    outside = [module for _, module in root.named_modules(memo={*inner})]
    parameters = (p for module in outside for p in module.parameters(recurse=False))
    return list(dict.fromkeys(p for p in parameters if p in inside))


def followed_slots(
    modules: Iterable[nn.Module], device: torch.device, homes: Mapping[nn.Parameter, torch.device]
) -> frozenset[Slot]:
    """Return the slots of ``modules``, on ``device``, whose parameters have another home."""
    return frozenset(
        (module, name)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and homes.get(parameter, device) != device
    )


def check_copies(
    slots: Iterable[Slot],
    device: torch.device,
    homes: Mapping[nn.Parameter, torch.device],
    *,
    on_host: bool = False,
) -> None:
    """Refuse parameters of which a copy would not do, see :func:`followed_slots`.

    Copies of those on the host come and go with their attributes, if ``on_host``.
    """
    for module, name in slots:
        parameter = module._parameters[name]
        assert parameter is not None, "a followed slot has a parameter"
        places = {device, homes[parameter]} - {META}
        if on_host and HOST in places:
            _check_host_copy(module, name, parameter)
        else:
            _check_copy(module, name, parameter, places)


def _check_copy(
    module: nn.Module, name: str, parameter: nn.Parameter, places: set[torch.device]
) -> None:
    """Refuse a parameter with tensors in attributes, such as scales, which its copy lacks."""
    # A class that is made of tensors copies all of them.
    if type(parameter) is nn.Parameter or has_own_dispatch(parameter):
        return
    attributes = _attributes_with(parameter, lambda tensor: {tensor.device} != places)
    if attributes:
        raise ValueError(
            "a weight that stages on several devices share must be all in its values: got "
            f"{_title(module, name)} with tensors in {attributes}, on "
            f"{' and '.join(sorted(map(str, places)))}. Choose a balance that puts the layers "
            "that share it into stages of one device, or quantise them without sharing it."
        )


def _check_host_copy(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Refuse a weight that cannot come and go, one tensor after another."""
    parts = not has_own_dispatch(parameter) or is_traceable_wrapper_subclass(parameter)
    if parameter.layout is not torch.strided or not parts:
        raise ValueError(
            "a weight at home on the host must be dense, or of a class that says by "
            f"__tensor_flatten__ what it is made of: got {_title(module, name)}. Write "
            "weights='device'."
        )
    trained = _attributes_with(parameter, lambda tensor: tensor.requires_grad)
    if type(parameter) is not nn.Parameter and trained:
        raise ValueError(
            "a tensor in an attribute of a weight at home on the host must not require a gradient: "
            f"got {_title(module, name)} with {trained}. Make it a parameter of the layer, or "
            "write weights='device'."
        )


def _title(module: nn.Module, name: str) -> str:
    """Name a parameter and its class: ``weight of a Linear4bit, a Params4bit``."""
    kind = type(module._parameters[name])
    return f"{name} of a {type(module).__name__}, a {kind.__name__}"


def _attributes_with(parameter: nn.Parameter, chosen: Callable[[Tensor], bool]) -> str:
    slots = vars(parameter).items()
    return ", ".join(name for name, x in slots if any(map(chosen, tensors_within(x))))


def _unshared(layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for name, module in layer.named_modules():
        yield "module", name, module
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer
    for name, value in attributes_in(layer):
        for content in filter(is_generator, within(value)):
            yield "generator", name, content
