"""The kinds of the values in a traced forward: tensors, numbers and sizes.

Python asks values for their class in ``isinstance``; a wrong answer would trace the wrong branch,
so the kind is UNKNOWN wherever it is not certain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm


class ValueKind(Enum):
    """The kind of a value."""

    TENSOR = auto()
    NUMBER = auto()  # an int, made of sizes
    SIZES = auto()  # a torch.Size
    UNKNOWN = auto()


CLASS_OF = {ValueKind.TENSOR: Tensor, ValueKind.NUMBER: int, ValueKind.SIZES: torch.Size}

_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
    | {operator.pos, operator.iadd, operator.isub, operator.imul, operator.ifloordiv}
)
_RETURN_OTHERS = (  # names of functions and methods that return no tensor, or may not
    "split chunk unbind tensor_split hsplit vsplit dsplit max min topk sort median mode kthvalue "
    "cummax cummin aminmax meshgrid broadcast_tensors var_mean std_mean unsafe_chunk unsafe_split "
    "tolist item numpy stride nonzero where unique unique_consecutive svd qr slogdet eig lstsq "
    "multi_head_attention_forward atleast_1d atleast_2d atleast_3d einsum_path data_ptr "
    "element_size is_contiguous is_floating_point is_complex get_device storage_offset "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices"
)
_SEVERAL = frozenset(_RETURN_OTHERS.split())
_LAYERS_WITH_SEVERAL = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Identity)


def kind_of(value: Any) -> ValueKind:
    """Return the kind of a node's value, or of a constant."""
    if isinstance(value, fx.Node):
        return value.meta.get("kind", ValueKind.UNKNOWN)
    if isinstance(value, Tensor):
        return ValueKind.TENSOR
    return ValueKind.NUMBER if type(value) in (int, float, bool) else ValueKind.UNKNOWN


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls; empty for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "")


def infer_kind(node: fx.Node, module_of: Callable[[str], Any]) -> ValueKind:
    """Infer the kind of a new node's value; ``module_of`` returns the module at a path."""
    match node.op:
        case "call_module":
            return _of_layer(module_of(str(node.target)))
        case "call_method":
            return _of_method(str(node.target), node.args)
        case "call_function":
            return _of_function(node.target, node.args)
    return kind_of(node)


def _of_layer(module: Any) -> ValueKind:
    if isinstance(module, _BatchNorm):
        return ValueKind.TENSOR
    of_torch = type(module).__module__.startswith("torch.nn.modules")
    indices = getattr(module, "return_indices", False)
    if not of_torch or indices or isinstance(module, _LAYERS_WITH_SEVERAL):
        return ValueKind.UNKNOWN
    return ValueKind.TENSOR


def _of_method(name: str, args: tuple[Any, ...]) -> ValueKind:
    if not args or kind_of(args[0]) is not ValueKind.TENSOR:
        return ValueKind.UNKNOWN
    if name == "size":
        return ValueKind.NUMBER if len(args) > 1 else ValueKind.SIZES
    if name in ("dim", "ndimension", "numel", "nelement", "__len__"):
        return ValueKind.NUMBER
    return ValueKind.UNKNOWN if name in _SEVERAL else ValueKind.TENSOR


def _of_function(function: Any, args: tuple[Any, ...]) -> ValueKind:
    if function is getattr:
        return _of_attribute(args)
    if function is operator.getitem:
        return _of_item(args)
    kinds = [kind_of(argument) for argument in args]
    if all(kind is ValueKind.NUMBER for kind in kinds) and function in _ARITHMETIC:
        return ValueKind.NUMBER
    if _from_torch(function) and function.__name__ not in _SEVERAL:
        return ValueKind.TENSOR
    if getattr(function, "__module__", "") == "_operator" and ValueKind.TENSOR in kinds:
        return ValueKind.TENSOR
    return ValueKind.UNKNOWN


def _of_attribute(args: tuple[Any, ...]) -> ValueKind:
    if kind_of(args[0]) is not ValueKind.TENSOR:
        return ValueKind.UNKNOWN
    match args[1]:
        case "shape":
            return ValueKind.SIZES
        case "ndim":
            return ValueKind.NUMBER
        case "T" | "mT" | "H" | "mH" | "real" | "imag" | "data":
            return ValueKind.TENSOR
    return ValueKind.UNKNOWN


def _of_item(args: tuple[Any, ...]) -> ValueKind:
    match kind_of(args[0]):
        case ValueKind.TENSOR:
            return ValueKind.TENSOR
        case ValueKind.SIZES:
            return ValueKind.SIZES if isinstance(args[1], slice) else ValueKind.NUMBER
    return ValueKind.UNKNOWN


def _from_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    if module.startswith(("torch.nn.functional", "torch._C._nn", "torch.functional", "torch._C")):
        return True
    return getattr(torch._C._VariableFunctions, getattr(function, "__name__", ""), None) == function
