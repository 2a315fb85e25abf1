"""Parameters and buffers on the meta device whose values are in a file.

A model that is too large for the host is built on the meta device, and a tensor of it is read when
it is placed: only then its device is known. Until then the tensor itself knows where its value is.
Names would not do: whoever wraps the model or one of its layers, as an adapter does, renames what
is in it, and a tied parameter has several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_lightning_gpipe_value"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of safetensors.

    Attributes:
        file: The file.
        name: Its name in the file.
        shape: Its shape.
        floating: Whether it has a floating-point type.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    floating: bool

    def read(self) -> Tensor:
        """The tensor, on the CPU; its memory is that of the file, mapped."""
        with opened(self.file) as file:
            found: Tensor = file.get_tensor(self.name)
            return found

    def read_into(self, tensor: Tensor) -> None:
        """Copy the values to ``tensor``, on its device and in its type."""
        with torch.no_grad():
            tensor.copy_(self.read())


class Initialised:
    """The value of a tensor that no file has: its module initialises it."""


class Elsewhere:
    """The value of a tensor that another process has."""


class Awaited(nn.Parameter):
    """A parameter on the meta device that knows where its value is; a copy of it knows it too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaited:
        copied: Awaited = super().__deepcopy__(memo)
        copied.__dict__.update(self.__dict__)
        return copied


def opened(file: Path) -> Any:
    """A file of safetensors, open for the duration of a ``with`` block.

    Raises:
        ImportError: If safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs the package safetensors: got none. Run pip install safetensors."
        ) from error
    return safe_open(file, framework="pt")


def await_value(tensor: Tensor, value: Stored | Initialised | Elsewhere) -> None:
    """Let ``tensor``, on the meta device, have its value there; it gets it when it is placed."""
    if type(tensor) is nn.Parameter:
        tensor.__class__ = Awaited
    setattr(tensor, _ATTRIBUTE, value)


def stored_value(tensor: Tensor) -> Stored | None:
    """Where the value of a tensor on the meta device is, if it is in a file."""
    value = tensor.__dict__.get(_ATTRIBUTE)
    return value if isinstance(value, Stored) else None


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether another process has the value of a tensor that is on the meta device here."""
    return tensor.is_meta and isinstance(tensor.__dict__.get(_ATTRIBUTE), Elsewhere)


def check_awaited(root: nn.Module) -> None:
    """Raise if a model whose values are in files has been given other tensors on the meta device.

    An adapter that is added to a layer on the meta device is on it too, and the values that its
    library gave it are lost; ``reset_parameters()`` of its linear layers would give it others.

    Raises:
        ValueError: Names them.
    """
    on_meta = [(name, tensor) for name, tensor in _tensors(root) if tensor.is_meta]
    unknown = [name for name, tensor in on_meta if _ATTRIBUTE not in tensor.__dict__]
    if len(unknown) < len(on_meta) and unknown:
        raise ValueError(
            "what is added to a model after load_pretrained() must have values: got "
            f"{shortened(unknown)} on the meta device. Build it on the CPU. Adapters follow the "
            "device of the layer that they are added to: give theirs memory with "
            "to_empty(device='cpu') and initialise them once more."
        )


def shortened(names: list[str], most: int = 6) -> str:
    """The first of these names, and how many others there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(root.named_parameters(), root.named_buffers())
