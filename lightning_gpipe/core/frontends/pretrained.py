"""Builds a model without the memory of its parameters, and gives it the values in a folder.

Each tensor is read alone, onto its device if it has one, or when it is placed; the headers of the
files are checked before. Buffers that no file has, such as the frequencies of rotary embeddings,
are computed by constructors alone, so ``torch.device("meta")`` would not do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gpipe.core.frontends.device_moves import initialiser
from lightning_gpipe.core.frontends.stored import (
    Source,
    StoredTensor,
    await_value,
    first_few,
    note_files,
    open_tensors,
)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that this thread builds in a ``with`` block on the meta device.

    A parameter moves there as soon as a module has it, so the host has one of them at a time.
    Buffers have the values that the module's constructor gives them. Parameters of other classes
    than ``nn.Parameter`` stay as they are.
    """
    thread = get_ident()
    # A tied parameter is registered several times; to hold it would hold its memory.
    replacements: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    # PyTorch declares that such a hook returns nothing, and takes a parameter from it.
    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta or get_ident() != thread:
            return None  # registered as it is
        if parameter not in replacements:
            replacements[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        return replacements[parameter]

    with register_module_parameter_registration_hook(on_meta):
        yield


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
    state = model.state_dict(keep_vars=True)  # a tied tensor has several names there
    names = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    renamings = _renamings(tensors_in(Path(path)), model)
    stored = max(renamings, key=lambda renamed: len(names.keys() & renamed.keys()))
    values: dict[int, StoredTensor] = {}  # by the id of the tensor, under the first of its names
    for name, tensor in names.items():
        if name in stored:
            values.setdefault(id(tensor), stored[name])
    allowed, ignored = tuple(missing), tuple(unexpected)
    absent = [name for name, tensor in names.items() if id(tensor) not in values]
    faults = {
        "missing in the files": [name for name in absent if not _matches(name, allowed)],
        "unexpected in the files": [
            name for name in stored if name not in names and not _matches(name, ignored)
        ],
        "different": [
            f"{name} is {tuple(tensor.shape)}, {tensor.dtype} in the model, and in the files "
            f"{value.shape}, {'floating point' if value.floating else 'integer'}"
            for name, tensor in names.items()
            if (value := values.get(id(tensor))) is not None
            and (tensor.shape, tensor.is_floating_point()) != (value.shape, value.floating)
        ],
    }
    _check(path, faults)
    for module in model.modules():
        if any(x.is_meta and id(x) not in values for x in module.buffers(recurse=False)):
            initialiser(module)  # raises if there is none
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            await_value(tensor, values.get(id(tensor), Source.INITIALISED))
    note_files(model, path)
    for tensor in {id(tensor): tensor for tensor in names.values()}.values():
        if not tensor.is_meta and id(tensor) in values:
            values[id(tensor)].read_into(tensor)


def _check(path: str | Path, faults: Mapping[str, list[str]]) -> None:
    listed = [f"{fault}: {first_few(names)}" for fault, names in faults.items() if names]
    if listed:
        raise ValueError(
            f"pretrained weights must fit the model: got from {path} {'; '.join(listed)}. What "
            "may be so is named in missing=[...] and unexpected=[...], in which * is for any "
            "characters. Call load_pretrained() before adapters are added, which rename layers."
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _renamings(
    stored: Mapping[str, StoredTensor], model: nn.Module
) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of files by their names, and by those that they may have in a model.

    A model with a head has its base in a child, as in ``model.layers.0``; files may be of either.
    """
    yield dict(stored)
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in stored.items()}
    for head in dict.fromkeys(name.partition(".")[0] for name in stored):
        yield {name.removeprefix(f"{head}."): tensor for name, tensor in stored.items()}


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a file of safetensors, or of a folder of such files, from the headers."""
    files, listed = _files(path)
    tensors = {name: stored for file in files for name, stored in _contents(file).items()}
    if lacking := [name for name in listed if name not in tensors]:
        raise ValueError(
            f"the files in {path} must have the tensors that its index lists: got none for "
            f"{first_few(lacking)}. Save the model again with save_pretrained()."
        )
    return tensors


def _files(path: Path) -> tuple[list[Path], list[str]]:
    if path.is_file():
        return [path], []
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        weight_map: dict[str, str] = json.loads(indices[0].read_text("utf-8"))["weight_map"]
        return [path / name for name in sorted(set(weight_map.values()))], list(weight_map)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not indices:
        return files, []
    content = "nothing there"
    if path.is_dir():
        content = f"one with {first_few(sorted(x.name for x in path.iterdir())) or 'no files'}"
    raise FileNotFoundError(
        "pretrained weights must be in a file of safetensors, or in a folder with one, or with "
        f"several and their index: got {path}, {content}. Models of a hub are downloaded by "
        "huggingface_hub.snapshot_download(), and model.save_pretrained(folder) writes such a "
        "folder from other formats."
    )


def _contents(file: Path) -> dict[str, StoredTensor]:
    with open_tensors(file) as header:
        slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118
        floating = ("F", "BF")  # as F32, BF16, F8_E4M3
        return {
            name: StoredTensor(file, name, tuple(x.get_shape()), x.get_dtype().startswith(floating))
            for name, x in slices.items()
        }
