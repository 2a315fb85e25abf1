"""Any Python value as bytes, with its tensors beside it.

To pickle tensors would copy them three times. A pickler lets values be left out by number, so
whatever object a batch is, the bytes of its tensors travel as they are, those of the same memory
once.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import identity
from lightning_gpipe.core.transport import form_and_bytes, is_dense, tensor_of


def pack(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return a value without its tensors as bytes, and the bytes of each tensor that has any."""
    body = io.BytesIO()
    packer = _Packer(body)
    packer.dump(value)
    pairs = [form_and_bytes(tensor) for tensor in packer.tensors]
    text = pickle.dumps(([form for form, _ in pairs], body.getvalue()))
    return text, [content for _, content in pairs if content.numel()]


def unpack(text: bytes, fill: Callable[[Tensor], object]) -> Any:
    """Return the value, with its tensors on the CPU.

    Args:
        text: The value without its tensors.
        fill: Writes the bytes of the next tensor into its argument.
    """
    forms, body = pickle.loads(text)
    tensors = [tensor_of(form, fill).requires_grad_(form.requires_grad) for form in forms]
    return _Unpacker(io.BytesIO(body), tensors).load()


class _Packer(pickle.Pickler):
    """Leaves out dense tensors.

    Attributes:
        tensors: The tensors that were left out.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not is_dense(value) or value.is_meta:
            return None
        key = identity(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self.tensors.append(value)
        return self._numbers[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]
