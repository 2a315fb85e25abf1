"""What is known of a value while it is traced: whether it is a tensor, a number or a size.

Python asks values for their class in ``isinstance``; a wrong answer would trace the wrong branch.
So one is given only where it is certain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Kind(Enum):
    """What a value is."""

    TENSOR = auto()
    NUMBER = auto()  # an int, made of sizes
    SIZES = auto()  # a torch.Size
    UNKNOWN = auto()


CLASS_OF = {Kind.TENSOR: Tensor, Kind.NUMBER: int, Kind.SIZES: torch.Size}

ARITHMETIC = frozenset(
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


def kind_of(node: fx.Node, module_of: Callable[[str], Any]) -> Kind:
    """What the value of a node is, from what made it.

    Args:
        node: The node.
        module_of: Returns the module at a path.
    """
    match node.op:
        case "call_module":
            return _of_layer(module_of(str(node.target)))
        case "call_method":
            return _of_method(str(node.target), node.args)
        case "call_function":
            return _of_function(node.target, node.args)
    return node.meta.get("kind", Kind.UNKNOWN)


def known(value: Any) -> Kind:
    """What an argument of a node is."""
    if isinstance(value, fx.Node):
        return node_kind(value)
    if isinstance(value, Tensor):
        return Kind.TENSOR
    return Kind.NUMBER if type(value) in (int, float, bool) else Kind.UNKNOWN


def node_kind(node: fx.Node) -> Kind:
    """What is known of the value of a node."""
    return node.meta.get("kind", Kind.UNKNOWN)


def _of_layer(module: Any) -> Kind:
    if isinstance(module, _BatchNorm):
        return Kind.TENSOR
    own = type(module).__module__.startswith("torch.nn.modules")
    indices = getattr(module, "return_indices", False)
    if not own or indices or isinstance(module, _LAYERS_WITH_SEVERAL):
        return Kind.UNKNOWN
    return Kind.TENSOR


def _of_method(name: str, args: tuple[Any, ...]) -> Kind:
    if not args or known(args[0]) is not Kind.TENSOR:
        return Kind.UNKNOWN
    if name == "size":
        return Kind.NUMBER if len(args) > 1 else Kind.SIZES
    if name in ("dim", "ndimension", "numel", "nelement", "__len__"):
        return Kind.NUMBER
    return Kind.UNKNOWN if name in _SEVERAL else Kind.TENSOR


def _of_function(function: Any, args: tuple[Any, ...]) -> Kind:
    if function is getattr:
        return _of_attribute(args)
    if function is operator.getitem:
        return _of_item(args)
    if _all_numbers(args) and function in ARITHMETIC:
        return Kind.NUMBER
    if _from_torch(function) and function.__name__ not in _SEVERAL:
        return Kind.TENSOR
    if getattr(function, "__module__", "") == "_operator" and any(
        known(each) is Kind.TENSOR for each in args
    ):
        return Kind.TENSOR
    return Kind.UNKNOWN


def _of_attribute(args: tuple[Any, ...]) -> Kind:
    if known(args[0]) is not Kind.TENSOR:
        return Kind.UNKNOWN
    match args[1]:
        case "shape":
            return Kind.SIZES
        case "ndim":
            return Kind.NUMBER
        case "T" | "mT" | "H" | "mH" | "real" | "imag" | "data":
            return Kind.TENSOR
    return Kind.UNKNOWN


def _of_item(args: tuple[Any, ...]) -> Kind:
    match known(args[0]):
        case Kind.TENSOR:
            return Kind.TENSOR
        case Kind.SIZES:
            return Kind.SIZES if isinstance(args[1], slice) else Kind.NUMBER
    return Kind.UNKNOWN


def _all_numbers(args: Iterable[Any]) -> bool:
    return all(known(each) is Kind.NUMBER for each in args)


def _from_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    if module.startswith(("torch.nn.functional", "torch._C._nn", "torch.functional", "torch._C")):
        return True
    return getattr(torch._C._VariableFunctions, getattr(function, "__name__", ""), None) == function
