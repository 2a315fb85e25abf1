"""A stand-in for a tensor that a block will return when the pipeline runs.

A placeholder has a type and a device, and computes its shape on demand. Operators on it are
recorded; operators that need its value are refused. When the pipeline has run it becomes the tensor
that it stood for: the user may have it in a list, and need not know that it was anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import Pending
from lightning_gpipe.core.frontends.module_list.tape.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf


class Placeholder(Pending):
    """Stands for a value of a recording.

    Attributes:
        recording: The LoopRecording that it belongs to.
        number: The number of the value; another one once it was edited in place.
        leaf: Its type, number of dims and reading.
    """

    recording: Any
    number: int
    leaf: TensorLeaf

    @staticmethod
    def __new__(cls, recording: Any, number: int, leaf: TensorLeaf) -> Placeholder:
        # Nothing reads these sizes: every access from Python comes to __torch_function__.
        tensor = Tensor._make_wrapper_subclass(cls, (0,), dtype=leaf.dtype, device=recording.device)
        tensor.recording, tensor.number, tensor.leaf = recording, number, leaf
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Placeholder(%{self.number} of a pipeline that has not run yet)"

    @property
    def sizes(self) -> torch.Size:
        """The shape for the whole mini-batch."""
        size: torch.Size = self.recording.shape_of(self.number)
        return size

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        attribute = _ATTRIBUTES.get(func)
        if attribute is not None and isinstance(args[0], Placeholder):
            return attribute(args[0], *args[1:], **kwargs)
        first = next(_placeholders_in((args, kwargs)), None)
        if first is None:  # in a container of the user's own class
            raise RuntimeError(f"{func} must be given tensors, or tuples, lists or dicts of them.")
        return first.recording.operator(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *arguments: Any) -> Any:
        raise next(_placeholders_in(arguments)).recording.needs_value(func)


def become(placeholder: Tensor, value: Tensor) -> None:
    """Make the placeholder the tensor ``value``, a new object that nothing else refers to."""
    # Like torch.utils.swap_tensors, which refuses a placeholder that autograd has saved, as a
    # torch.utils.checkpoint around a block does with the block's arguments.
    with torch._C.DisableTorchFunctionSubclass():
        placeholder.__class__, value.__class__ = Tensor, Placeholder
        placeholder.__dict__, value.__dict__ = value.__dict__, placeholder.__dict__
        torch._C._swap_tensor_impl(placeholder, value)


def _placeholders_in(arguments: Any) -> Iterator[Placeholder]:
    return (leaf for _, leaf in leaves_in(arguments) if isinstance(leaf, Placeholder))


def _size(x: Placeholder, dim: int | None = None) -> Any:
    return x.sizes if dim is None else x.sizes[dim]


def _index(device: torch.device) -> int | None:
    return -1 if device.type == "cpu" else device.index


def _requires_grad(x: Placeholder) -> bool:
    return x.recording.grad and (x.leaf.dtype.is_floating_point or x.leaf.dtype.is_complex)


def _false(*_: Any) -> bool:
    return False


_FALSE = ("is_sparse", "is_nested", "is_quantized", "is_meta", "is_mps", "is_xpu")
_ATTRIBUTES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda x, *_: x.sizes,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: lambda x: x.sizes[0],
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), lambda x: x.sizes.numel()),
    Tensor.ndim.__get__: lambda x, *_: x.leaf.dims,  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.dim, Tensor.ndimension), lambda x: x.leaf.dims),
    Tensor.dtype.__get__: lambda x, *_: x.leaf.dtype,  # type: ignore[attr-defined]
    Tensor.device.__get__: lambda x, *_: x.recording.device,
    Tensor.get_device: lambda x: _index(x.recording.device),
    Tensor.is_cuda.__get__: lambda x, *_: x.recording.device.type == "cuda",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda x, *_: x.recording.device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_floating_point: lambda x: x.leaf.dtype.is_floating_point,
    torch.is_floating_point: lambda x: x.leaf.dtype.is_floating_point,
    Tensor.is_complex: lambda x: x.leaf.dtype.is_complex,
    torch.is_complex: lambda x: x.leaf.dtype.is_complex,
    Tensor.element_size: lambda x: x.leaf.dtype.itemsize,
    Tensor.itemsize.__get__: lambda x, *_: x.leaf.dtype.itemsize,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: lambda x, *_: _requires_grad(x),  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: lambda x, *_: not _requires_grad(x),  # type: ignore[attr-defined]
    Tensor.layout.__get__: lambda x, *_: torch.strided,  # type: ignore[attr-defined]
    **{getattr(Tensor, name).__get__: _false for name in _FALSE},
    Tensor.__hash__: lambda x: id(x),
}  # fmt: skip
