"""Chooses devices, and puts modules there without ever having all of a large model on one.

Parameters stay the same objects, and tied ones stay tied. A module on the ``meta`` device gets its
memory on its own device, and its values from a checkpoint, a file or ``reset_parameters()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_gpipe.core.faithful import has_memory, parts_of
from lightning_gpipe.core.frontends.stored import (
    Source,
    StoredTensor,
    attributes_of,
    await_value,
    check_unread_weights,
    is_in_another_process,
    place_of_value,
)
from lightning_gpipe.core.layout import HOST, META, Layout, check_even


def choose_devices(
    devices: Sequence[str | torch.device] | None, *stages: int
) -> list[torch.device]:
    """Return the device of each worker, for pipelines with these numbers of stages.

    None chooses as many GPUs as divide these (warning if it is one of several), or CPU threads.
    """
    if devices is None:
        common = gcd(*stages)
        gpus = torch.cuda.device_count()
        used = max((k for k in range(1, gpus + 1) if common % k == 0), default=0)
        if used == 1 < min(*stages, gpus):
            numbers = " and ".join(map(str, stages))
            warnings.warn(
                f"all {numbers} stages share one GPU, so nothing runs at the same time: no other "
                f"number of the {gpus} GPUs divides {numbers}. Cut the layers into {gpus} stages, "
                "or a multiple of that, or give a device for each stage.",
                stacklevel=3,  # where a GPipe is made
            )
        chosen = [torch.device("cuda", k) for k in range(used)]
        chosen = chosen or [torch.device("cpu")] * common
    else:
        chosen = [torch.device(device) for device in devices]
    for n in stages:
        check_even(
            n,
            len(chosen),
            f"The devices are {[str(device) for device in chosen]}. Give {n} devices, or a "
            "balance with another number of stages.",
        )
    return list(map(with_index, chosen))


def with_index(device: torch.device) -> torch.device:
    """Return the device with the index that ``tensor.device`` has."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def place_all(root: nn.Module, layouts: Sequence[Layout]) -> None:
    """Move the layers to their devices, to meta if in another process, and the rest around them."""
    check_unread_weights(root)
    layers = {layer for layout in layouts for layer in layout.layers}
    with replaceable(*root.modules()):
        place_around(root, layers, layouts[0].outside)
        for layout in layouts:
            _place_stages(layout)
        for layout in layouts:
            _check_values(layout)
        for layout in layouts:
            move_home(layout)


def _place_stages(layout: Layout) -> None:
    homed = {id(p) for p, home in layout.homes.items() if home != META}
    # All processes draw what they initialise from one generator, that of the CPU.
    created_on = torch.device("cpu") if layout.spread else None
    for j, partition in enumerate(layout.partitions):
        for layer in partition.layers:
            if layout.owner_of(j) != layout.rank:
                forget(layer, homed)
            elif layout.placement[j] in layout.away_from_weights:
                _place_on_host(layer, layout.device_of(j))
            else:
                place(layer, layout.device_of(j), created_on)


def move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if device == META:
            forget_values(parameter)
        elif parameter.device != device:
            move(parameter, device)
        if device == HOST and layout.away_from_weights:
            _pin(parameter)


def _check_values(layout: Layout) -> None:
    here = [parameter for parameter, home in layout.homes.items() if home != META]
    lost = [parameter for parameter in here if is_in_another_process(parameter)]
    if lost:
        raise ValueError(
            "the parameters of a stage must have values in the process that runs it: got "
            f"{len(lost)} whose values another process has, from an earlier pipeline. Cut the "
            "model as before, or load its values from a checkpoint."
        )


def place(module: nn.Module, device: torch.device, created_on: torch.device | None = None) -> None:
    """Move ``module`` to ``device``; create and initialise its meta tensors.

    Tensors that :func:`forget` has moved to the meta device stay there. Meta tensors are created on
    ``created_on`` (default: ``device``), whose random number generator initialises them.
    """
    for submodule in module.modules():
        _materialise(submodule, created_on or device)
    if any(map(is_in_another_process, chain(module.parameters(), module.buffers()))):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def _place_on_host(module: nn.Module, device: torch.device) -> None:
    """Move the parameters of ``module`` to the host, none of them by way of a device."""
    place(module, HOST)
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = buffer.to(device)


def _pin(parameter: nn.Parameter) -> None:
    """Lock the memory of a parameter on the host, so that copies to a GPU need no wait."""
    for part in parts_of(parameter) if torch.cuda.is_available() else ():
        if part.device == HOST and has_memory(part) and not part.is_pinned():
            part.data = part.data.pin_memory()


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move one parameter, which stays the same object, and its gradient to ``device``."""
    gradient = parameter.grad
    if is_traceable_wrapper_subclass(parameter):  # made of tensors, which .data does not replace
        become(parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
        parameter.grad = None if gradient is None else gradient.to(device)
        return
    parameter.data = parameter.data.to(device)
    if gradient is not None:
        gradient.data = gradient.data.to(device)


def become(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the class and the values of another one; it keeps its attributes and hooks."""
    other.__dict__ = {**attributes_of(tensor), **other.__dict__}
    torch.utils.swap_tensors(tensor, other)
    with DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name)) is not None:
                setattr(tensor, name, hooks)  # those that PyTorch runs belong to the other one now


@contextmanager
def replaceable(*modules: nn.Module) -> Iterator[None]:
    """Let the parameters of layers be swapped, in a ``with`` block.

    PyTorch does not swap parameters with weak references, as recurrent layers have, nor those with
    a graph, as weights of ``nn.utils.weight_norm`` have, which are computed anew in each forward.
    """
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    for each in modules:
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                vars(each)[hook.name] = vars(each)[hook.name].detach()
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


def forget(module: nn.Module, except_ids: Collection[int]) -> None:
    """Move ``module``, whose values another process has, to the meta device.

    Parameters stay the same objects; those in ``except_ids`` keep their values. Tensors without
    values are initialised first, one module at a time, to draw the same random numbers as there.
    """
    for submodule in module.modules():
        _materialise(submodule, torch.device("cpu"))
        with replaceable(submodule):
            for parameter in submodule._parameters.values():
                if parameter is not None and id(parameter) not in except_ids:
                    forget_values(parameter)
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = empty = torch.empty_like(buffer, device="meta")
                await_value(empty, Source.ELSEWHERE)


def forget_values(parameter: Tensor) -> None:
    """Move one parameter or buffer, which stays the same object, to the meta device."""
    if not parameter.is_meta:
        empty = torch.empty_like(parameter, device="meta")
        kind: Any = type(parameter)
        replacement: Any
        if issubclass(kind, DTensor):
            replacement = nn.Parameter(empty, parameter.requires_grad)
        else:
            replacement = Tensor._make_subclass(kind, empty, parameter.requires_grad)
        become(parameter, replacement)
        await_value(parameter, Source.ELSEWHERE)


def recall(parameter: Tensor, device: torch.device) -> None:
    """Give a parameter memory on ``device``, whose values another process has and will send."""
    if is_in_another_process(parameter):
        created = torch.empty_like(parameter, device=device)
        become(parameter, nn.Parameter(created, parameter.requires_grad))


def place_around(root: nn.Module, inner: Collection[nn.Module], device: torch.device) -> None:
    """Move all of ``root`` except the modules in ``inner`` to ``device``."""
    if root in inner:
        return
    if not any(module in inner for module in root.modules()):
        place(root, device)
        return
    for child in root.children():
        place_around(child, inner, device)
    _materialise(root, device)
    root._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)


def on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``module`` is on the meta device."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def _materialise(module: nn.Module, device: torch.device) -> None:
    tensors = chain(module._parameters.values(), module._buffers.values())
    own = [tensor for tensor in tensors if tensor is not None and not is_in_another_process(tensor)]
    if not any(tensor.is_meta for tensor in own):
        return
    places = [(tensor, place_of_value(tensor)) for tensor in own if tensor.is_meta]
    in_files = [(tensor, x) for tensor, x in places if isinstance(x, StoredTensor)]
    missing = len(in_files) < sum(tensor.is_meta for tensor in own)
    initialise = initialiser(module) if missing else lambda: None
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)
    values = [(t, t.detach().clone()) for t in own if missing and not t.is_meta]
    with replaceable(module):
        for tensor in own:
            if tensor.is_meta:
                created = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    created = nn.Parameter(created, tensor.requires_grad)
                become(tensor, created)
    initialise()
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
    for tensor, stored in in_files:
        stored.read_into(tensor)


def initialiser(module: nn.Module) -> Callable[[], None]:
    """Return the method that initialises the tensors of a module, or raise TypeError."""
    for name in ("reset_parameters", "_reset_parameters"):  # PyTorch has both spellings
        initialise = getattr(module, name, None)
        if callable(initialise):
            return initialise
    raise TypeError(
        "a module with parameters or buffers on the meta device must have reset_parameters() to "
        f"initialise them: got {type(module).__name__} without. Write one, or build it on the CPU; "
        "under lightning_gpipe.pretrained.parameters_on_meta() buffers have their values."
    )
