"""A stand-in for a tensor that a block will return when the pipeline runs.

Operators on it are recorded; those that need its value are refused. When the pipeline has run it
becomes the tensor that it stood for, in the user's own lists too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.data import PendingTensor
from lightning_gpipe.core.frontends.module_list.tape.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.tape.calls import TensorLeaf


class Placeholder(PendingTensor):
    """Stands for a value of a recording; an edit in place gives it another ``number``."""

    recording: Any
    number: int
    leaf: TensorLeaf

    @staticmethod
    def __new__(cls, recording: Any, number: int, leaf: TensorLeaf) -> Placeholder:
        # Nothing reads these sizes, only their number: see _ATTRIBUTES.
        sizes, device = (0,) * leaf.dims, recording.device
        tensor = Tensor._make_wrapper_subclass(cls, sizes, dtype=leaf.dtype, device=device)
        tensor.recording, tensor.number, tensor.leaf = recording, number, leaf
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Placeholder(%{self.number} of a pipeline that has not run yet)"

    @property
    def sizes(self) -> torch.Size:
        """The shape for the whole mini-batch."""
        size: torch.Size = self.recording.samples.shape_of(self.number)
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
        if func in _OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
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


def _requires_grad(x: Placeholder) -> bool:
    return x.recording.state.grad and (x.leaf.dtype.is_floating_point or x.leaf.dtype.is_complex)


_ATTRIBUTES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda x, *_: x.sizes,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: lambda x: x.sizes[0],
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), lambda x: x.sizes.numel()),
    Tensor.requires_grad.__get__: lambda x, *_: _requires_grad(x),  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: lambda x, *_: not _requires_grad(x),  # type: ignore[attr-defined]
}
_OWN_ATTRIBUTES = (
    "dtype device layout ndim itemsize is_cpu is_cuda is_meta is_mps is_xpu is_nested is_quantized "
    "is_sparse"
)
_OWN_METHODS = "dim ndimension get_device element_size is_floating_point is_complex __hash__"
_OWN = frozenset(
    {torch.is_floating_point, torch.is_complex}
    | {getattr(Tensor, name).__get__ for name in _OWN_ATTRIBUTES.split()}
    | {getattr(Tensor, name) for name in _OWN_METHODS.split()}
)
