"""Gives the tensors of a model the values in a folder.

The usual way is to read all files into one state dict and to copy it: a host needs the memory of
the model twice. Here each tensor is read alone, onto its device if it has one, and if it is on the
meta device when it is placed. Everything is checked before, from the headers of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from lightning_gpipe.core.frontends.device_moves import initialiser
from lightning_gpipe.core.frontends.pretrained.folder import tensors_in
from lightning_gpipe.core.frontends.pretrained.names import matches, named_tensors, rename_to_fit
from lightning_gpipe.core.frontends.stored import Source, Stored, await_value, first_few


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
    head, or with a head that the model does not have. A parameter that is tied in the model is read
    once, under any of its names. Adapters that are added to the model later, and wrappers of it,
    change nothing.

    Args:
        model: The model, or a pipeline. Other parts of the same LightningModule are left alone.
        path: A folder with one file of safetensors, or several and their index; or one such file.
        missing: Names of tensors that the files need not have, as ``"classifier.*"``; those on the
            meta device are initialised by ``reset_parameters()`` of their modules.
        unexpected: Names of tensors in the files that the model need not have, as ``"lm_head.*"``.

    Raises:
        FileNotFoundError: If there are no such files.
        ValueError: If names, shapes or kinds of types differ; lists all that do.
        TypeError: If a buffer on the meta device is not in the files and its module has no
            ``reset_parameters()``: :func:`parameters_on_meta` gives it its value.
        ImportError: If safetensors is not installed.
    """
    names = named_tensors(model)
    stored = rename_to_fit(tensors_in(Path(path)), model, names.keys())
    values: dict[int, Stored] = {}  # by the id of the tensor, under the first of its names
    for name, tensor in names.items():
        if name in stored:
            values.setdefault(id(tensor), stored[name])
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
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        if any(buffer.is_meta and id(buffer) not in values for buffer in buffers):
            initialiser(module)  # raises if there is none
    for module in model.modules():
        for own in [*module._parameters.values(), *module._buffers.values()]:
            if own is not None and own.is_meta:
                await_value(own, values.get(id(own), Source.INITIALISED))
    for tensor in {id(tensor): tensor for tensor in names.values()}.values():
        if not tensor.is_meta and id(tensor) in values:
            values[id(tensor)].read_into(tensor)


def _fits(tensor: Tensor, value: Stored) -> bool:
    return tuple(tensor.shape) == value.shape and tensor.is_floating_point() == value.floating


def _check(
    path: str | Path, missing: list[str], unexpected: list[str], different: list[str]
) -> None:
    faults = [
        f"{what}: {first_few(names)}"
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
