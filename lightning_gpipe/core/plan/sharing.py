"""What stages may share with one another, and with modules outside of the pipeline.

Stages run at the same time, each on its device. A module on two stages would be run by two threads
at once, as would a generator of random numbers, and a buffer that layers change cannot be on two
devices: these are refused. A parameter can be shared: it is on one device, its home, and stages on
other devices follow it with copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.plan.held import held_in, is_generator, is_own, within
from lightning_gpipe.core.plan.layout import META, Layout

Slot = tuple[nn.Module, str]  # of a parameter or a buffer: the module, and the name in it


def check_sharing(layout: Layout) -> None:
    """Raise if stages share a module, a generator, or a buffer across devices.

    Raises:
        ValueError: Names everything that is shared, and by which layers.
    """
    owners: dict[Any, tuple[int, str]] = {}
    generators: dict[int, tuple[int, str]] = {}  # by id: not all are hashable
    faults: dict[str, None] = {}
    places = [(layout.owner_of(j), layout.device_of(j)) for j in range(layout.n)]
    for j, partition in enumerate(layout.partitions):
        for k, layer in zip(partition.indices, partition.layers, strict=True):
            for name, module in layer.named_modules():
                path = f"layer {k}{'.' + name if name else ''}"
                owner, where = owners.setdefault(module, (j, path))
                if owner != j:
                    faults[f"module {where} (stage {owner}) is {path} (stage {j})"] = None
            for name, buffer in layer.named_buffers(remove_duplicate=False):
                path = f"layer {k}.{name}"
                owner, where = owners.setdefault(buffer, (j, path))
                if places[owner] != places[j]:
                    there, here = (layout.where(k) for k in (owner, j))
                    faults[f"buffer {where} ({there}) is {path} ({here})"] = None
            for name, generator in _generators_in(layer):
                path = f"layer {k}.{name}"
                owner, where = generators.setdefault(id(generator), (j, path))
                if owner != j:
                    faults[f"generator {where} (stage {owner}) is {path} (stage {j})"] = None
    if faults:
        raise ValueError(
            "stages must not share modules or generators, nor buffers across devices: got "
            f"{'; '.join(faults)}. Choose a balance that puts these layers into one stage, or do "
            "not share them."
        )


def check_outside(
    root: nn.Module, inner: nn.Module, layout: Layout, root_device: torch.device
) -> None:
    """Raise if a stage shares a buffer with a module outside of the pipeline, across devices.

    Args:
        root: The module that contains the pipelined one.
        inner: The pipelined module.
        layout: What runs where.
        root_device: The device of everything outside of the pipeline.

    Raises:
        ValueError: Names everything that is shared.
    """
    owners = {
        buffer: partition.index
        for partition in layout.partitions
        for layer in partition.layers
        for buffer in layer.buffers()
    }
    faults = []
    for path, module in _outside(root, inner, ""):
        for name, buffer in module._buffers.items():
            if buffer is None or buffer not in owners:
                continue
            j = owners[buffer]
            if layout.spread or layout.device_of(j) != root_device:
                faults.append(f"{path}{name} ({root_device}) is in stage {j} ({layout.where(j)})")
    if faults:
        raise ValueError(
            "a stage must not share buffers with a module on another device: got "
            f"{'; '.join(faults)}. What is outside of the pipeline is on {root_device}: choose a "
            "balance that puts these layers into a stage there, or do not share them."
        )


def shared_with_outside(root: nn.Module, inner: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``inner`` that modules outside of it have too."""
    inside = set(inner.parameters())
    outside = chain.from_iterable(m._parameters.values() for _, m in _outside(root, inner, ""))
    return list(dict.fromkeys(p for p in outside if p is not None and p in inside))


def followed_slots(
    modules: Iterable[nn.Module],
    device: torch.device,
    homes: Mapping[nn.Parameter, torch.device],
) -> frozenset[Slot]:
    """The slots of ``modules``, on ``device``, whose parameters have another home."""
    return frozenset(
        (module, name)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and homes.get(parameter, device) != device
    )


def check_copies(
    slots: Iterable[Slot], device: torch.device, homes: Mapping[nn.Parameter, torch.device]
) -> None:
    """Raise if layers need more of a parameter than a copy of its values has.

    A quantised weight may have its scales in attributes, which are on one device.

    Args:
        slots: Those of parameters that a stage follows.
        device: The device of the stage.
        homes: The devices of the parameters; the meta device for those of another process.

    Raises:
        ValueError: Names the parameter, its class and the attributes.
    """
    for module, name in slots:
        parameter = module._parameters[name]
        kind: Any = type(parameter)
        # A class that is made of tensors copies all of them.
        if kind is nn.Parameter or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            continue
        assert parameter is not None, "a followed slot has a parameter"
        places = {device, homes[parameter]} - {META}
        held = [
            attribute
            for attribute, value in vars(parameter).items()
            if any({tensor.device} != places for tensor in _tensors_in(value))
        ]
        if held:
            raise ValueError(
                "a weight that stages on several devices share must be all in its values: got "
                f"{name} of a {type(module).__name__}, a {kind.__name__} with tensors in "
                f"{', '.join(held)}, on {' and '.join(sorted(map(str, places)))}. Choose a "
                "balance that puts the layers that share it into stages of one device, or "
                "quantise them without sharing it."
            )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that an attribute of a parameter holds, in containers and objects too."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        for each in within(waiting.pop()):
            if isinstance(each, Tensor):
                yield each
            elif is_own(each) and id(each) not in seen:
                seen.add(id(each))
                waiting += vars(each).values()


def _generators_in(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the generators of random numbers that modules of a layer hold, with their names."""
    for name, value in held_in(layer):
        yield from ((name, each) for each in within(value) if is_generator(each))


def _outside(module: nn.Module, inner: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be reached without passing through ``inner``, with its path."""
    if module is inner:
        return
    yield path, module
    for name, child in module.named_children():
        yield from _outside(child, inner, f"{path}{name}.")
