"""Parameters and buffers on the meta device whose values are in a file.

Each tensor of a large model is read when it is placed. Until then an attribute of it has the place
of its value. Names would not do: an adapter renames modules, and a tied parameter has several.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lightning_gpipe.core.frontends.absent import AbsentTensor, careful

_ATTRIBUTE = "_lightning_gpipe_value"
_LISTED = 6  # names in a message


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of safetensors, and whether it has a floating-point type."""

    file: Path
    name: str
    shape: tuple[int, ...]
    floating: bool

    def read(self) -> Tensor:
        """Return the tensor, on the CPU, in the mapped memory of the file."""
        with open_tensors(self.file) as file:
            tensor: Tensor = file.get_tensor(self.name)
            return tensor

    def read_into(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(self.read())


class Source(Enum):
    """The source of a value that no file has."""

    INITIALISED = auto()  # the reset_parameters() of its module
    ELSEWHERE = auto()  # another process


class AwaitedParameter(nn.Parameter):
    """A parameter on the meta device that has the place of its value, as its copies have."""

    def __deepcopy__(self, memo: dict[int, Any]) -> AwaitedParameter:
        with DisableTorchFunctionSubclass():
            copied: AwaitedParameter = super().__deepcopy__(memo)
        copied.__dict__.update(self.__dict__)
        return copied


class AbsentParameter(AwaitedParameter):
    """A parameter whose value another process has."""

    __torch_function__: Any = classmethod(careful)


def open_tensors(file: Path) -> Any:
    """Open a file of safetensors, for a ``with`` block."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs the package safetensors: got none. Run pip install safetensors."
        ) from error
    return safe_open(file, framework="pt")


def await_value(tensor: Tensor, value: StoredTensor | Source) -> None:
    """Set the place of the value of ``tensor``, on the meta device, until it is placed."""
    absent = value is Source.ELSEWHERE
    if type(tensor) in (nn.Parameter, AwaitedParameter):
        tensor.__class__ = AbsentParameter if absent else AwaitedParameter
    elif type(tensor) is Tensor and absent:
        tensor.__class__ = AbsentTensor
    setattr(tensor, _ATTRIBUTE, value)


def note_files(model: nn.Module, path: object) -> None:
    """Record that a model has values in files, also if its parameters are replaced by others."""
    setattr(model, _ATTRIBUTE, f"{path}")


def place_of_value(tensor: Tensor) -> StoredTensor | Source | None:
    """Return the place of the value of a tensor on the meta device, if it has one."""
    return tensor.__dict__.get(_ATTRIBUTE)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor without the place of its value."""
    return {name: value for name, value in vars(tensor).items() if name != _ATTRIBUTE}


def is_in_another_process(tensor: Tensor) -> bool:
    """Return whether another process has the value of a tensor that is on the meta device."""
    return tensor.is_meta and place_of_value(tensor) is Source.ELSEWHERE


def check_unread_weights(root: nn.Module) -> None:
    """Raise ValueError if tensors on the meta device were added to a model with values in files.

    ``reset_parameters()`` would give other values to an adapter that was added on the meta device,
    and to parameters that ``fully_shard`` has put in the place of those of the files.
    """
    tensors = chain(root.named_parameters(), root.named_buffers())
    on_meta = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
    unknown = [name for name, tensor in on_meta if _ATTRIBUTE not in tensor.__dict__]
    with_files = any(_ATTRIBUTE in vars(module) for module in root.modules())
    if unknown and (with_files or len(unknown) < len(on_meta)):
        raise ValueError(
            "what is added to a model after load_pretrained() must have values: got "
            f"{first_few(unknown)} on the meta device. Build it on the CPU. Adapters follow the "
            "device of the layer that they are added to: give theirs memory with "
            "to_empty(device='cpu') and initialise them once more. Call fully_shard() before "
            "load_pretrained()."
        )


def first_few(names: list[str]) -> str:
    """List the first of these names, and the number of the others."""
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + rest
