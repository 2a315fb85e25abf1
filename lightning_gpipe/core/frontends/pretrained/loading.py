"""Gives the tensors of a model the values in a folder.

The usual way is to read all files into one state dict and to copy it: a host needs the memory of
the model twice. Here a tensor is read alone, onto its device if it has one, and when it is placed
if it is on the meta device. Everything is checked before, from the headers of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from lightning_gpipe.core.frontends.placement import initialiser
from lightning_gpipe.core.frontends.pretrained.folder import tensors_in
from lightning_gpipe.core.frontends.pretrained.names import fitted, matches, named_tensors
from lightning_gpipe.core.frontends.stored import Initialised, Stored, await_value, shortened


def load_pretrained(
    model: nn.Module,
    path: str | Path,
    *,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
) -> None:
    """Give ``model`` the weights in a folder, as ``save_pretrained`` of transformers writes it.

    A parameter or buffer on the meta device gets its values when a pipeline puts it on the device
    of its stage, so that the host never has more than one tensor of the files in memory. One that
    has a device already, as in a :class:`~lightning_gpipe.GPipe`, gets them at once, there. Each
    keeps its own type, whatever that in the files is.

    Names are those of the model's state dict; the files may be those of a base model without its
    head, or with a head that the model has not. A parameter that is tied in the model is read once,
    under any of its names. What is added to the model later, such as adapters, and what wraps it,
    changes nothing.

    Args:
        model: The model, or a pipeline. Other parts of the same LightningModule are left alone.
        path: A folder with one file of safetensors, or several and their index; or one such file.
        missing: Names of tensors that the files need not have, as ``"classifier.*"``; those on the
            meta device are initialised by ``reset_parameters()`` of their modules.
        unexpected: Names of tensors in the files that the model need not have, as ``"lm_head.*"``.

    Raises:
        FileNotFoundError: If there are no such files.
        ValueError: If names, shapes or kinds of types differ; names all that do.
        TypeError: If a buffer on the meta device is not in the files and its module has no
            ``reset_parameters()``: :func:`parameters_on_meta` gives it its value.
        ImportError: If safetensors is not installed.
    """
    stored = fitted(tensors_in(Path(path)), model)
    names = named_tensors(model)
    values = _values(names, stored)
    allowed, ignored = tuple(missing), tuple(unexpected)
    absent = [name for name, tensor in names.items() if id(tensor) not in values]
    _check(
        path,
        [name for name in absent if not matches(name, allowed)],
        [name for name in stored if name not in names and not matches(name, ignored)],
        [
            f"{name} is {tuple(tensor.shape)}, {tensor.dtype} in the model, and in the files "
            f"{value.shape}, {'floating point' if value.floating else 'integer'}"
            for name, tensor in names.items()
            if (value := values.get(id(tensor))) is not None and not _fits(tensor, value)
        ],
    )
    for module in model.modules():
        _check_buffers(module, values)
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and tensor.is_meta:
                await_value(tensor, values.get(id(tensor), Initialised()))
    for tensor in {id(tensor): tensor for tensor in names.values()}.values():
        if not tensor.is_meta and id(tensor) in values:
            values[id(tensor)].read_into(tensor)


def _values(names: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[int, Stored]:
    """Where the value of each tensor is, by the id of the tensor: under the first of its names."""
    found: dict[int, Stored] = {}
    for name, tensor in names.items():
        if name in stored:
            found.setdefault(id(tensor), stored[name])
    return found


def _fits(tensor: Tensor, value: Stored) -> bool:
    return tuple(tensor.shape) == value.shape and tensor.is_floating_point() == value.floating


def _check(
    path: str | Path, missing: list[str], unexpected: list[str], different: list[str]
) -> None:
    faults = [
        f"{what}: {shortened(names)}"
        for what, names in [
            ("missing in the files", missing),
            ("unexpected in the files", unexpected),
            ("different", different),
        ]
        if names
    ]
    if faults:
        raise ValueError(
            f"pretrained weights must fit the model: got from {path} {'; '.join(faults)}. What "
            "may be so is named in missing=[...] and unexpected=[...], in which * is for any "
            "characters. Call load_pretrained() before adapters are added, which rename layers."
        )


def _check_buffers(module: nn.Module, values: Mapping[int, Stored]) -> None:
    """Raise if a buffer cannot be had: neither from the files nor by initialisation."""
    buffers = [each for each in module._buffers.values() if each is not None]
    if any(buffer.is_meta and id(buffer) not in values for buffer in buffers):
        initialiser(module)
