"""The values that a traced forward computes with, which record its operations, and their kinds.

Unlike torch.fx, they do not turn ``x += y`` into ``x = x + y``, and record an ``assert``. Python's
``isinstance`` gets the class of a value where that is certain, and is refused where it is not: a
wrong answer would trace the wrong branch.
"""

from __future__ import annotations

import dis
import linecache
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, Proxy, TraceError
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.frontends.lines import is_users


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
_ATTRIBUTES = {"shape": ValueKind.SIZES, "ndim": ValueKind.NUMBER} | dict.fromkeys(
    ["T", "mT", "H", "mH", "real", "imag", "data"], ValueKind.TENSOR
)
_LAYERS_WITH_SEVERAL = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Identity)


def kind_of(value: Any) -> ValueKind:
    """Return the kind of a node's value, or of a constant."""
    if isinstance(value, fx.Node):
        return value.meta.get("kind", ValueKind.UNKNOWN)
    if isinstance(value, Tensor):
        return ValueKind.TENSOR
    return ValueKind.NUMBER if type(value) in (int, float, bool) else ValueKind.UNKNOWN


def first_input(node: fx.Node) -> fx.Node | None:
    """Return the first argument of a step, if it is a value of the graph."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, fx.Node) else None


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls; empty for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "")


def filled(arguments: Any, value: Callable[[fx.Node], Any]) -> Any:
    """Return arguments of a step with ``value(node)`` for each node, in plain containers."""
    return _plain(fx.node.map_arg(arguments, value))


def _plain(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_plain(child) for child in tree]
    if isinstance(tree, dict):
        return {key: _plain(child) for key, child in tree.items()}
    if type(tree) is tuple:
        return tuple(map(_plain, tree))
    return tree


def infer_kind(node: fx.Node, module_of: Callable[[str], Any]) -> ValueKind:
    """Infer the kind of a new node's value; ``module_of`` returns the module at a path."""
    match node.op:
        case "call_module":
            return _of_layer(module_of(str(node.target)))
        case "call_method":
            return _of_method(str(node.target), node.args)
        case "call_function":
            return _of_function(node.target, node.args)
        case "get_attr":
            return ValueKind.TENSOR
    return kind_of(node)


def _of_layer(module: Any) -> ValueKind:
    of_torch = type(module).__module__.startswith("torch.nn.modules")
    several = getattr(module, "return_indices", False) or isinstance(module, _LAYERS_WITH_SEVERAL)
    is_tensor = isinstance(module, _BatchNorm) or (of_torch and not several)
    return ValueKind.TENSOR if is_tensor else ValueKind.UNKNOWN


def _of_method(name: str, args: tuple[Any, ...]) -> ValueKind:
    if not args or kind_of(args[0]) is not ValueKind.TENSOR:
        return ValueKind.UNKNOWN
    if name == "size":
        return ValueKind.NUMBER if len(args) > 1 else ValueKind.SIZES
    if name in ("dim", "ndimension", "numel", "nelement", "__len__"):
        return ValueKind.NUMBER
    return ValueKind.UNKNOWN if name in _SEVERAL else ValueKind.TENSOR


def _of_function(function: Any, args: tuple[Any, ...]) -> ValueKind:
    kinds = [kind_of(argument) for argument in args]
    if function is getattr:
        is_tensor = kinds[0] is ValueKind.TENSOR
        return _ATTRIBUTES.get(args[1], ValueKind.UNKNOWN) if is_tensor else ValueKind.UNKNOWN
    if function is operator.getitem:
        one_size = kinds[0] is ValueKind.SIZES and not isinstance(args[1], slice)
        return ValueKind.NUMBER if one_size else kinds[0]
    if all(kind is ValueKind.NUMBER for kind in kinds) and function in _ARITHMETIC:
        return ValueKind.NUMBER
    if _from_torch(function) and function.__name__ not in _SEVERAL:
        return ValueKind.TENSOR
    if getattr(function, "__module__", "") == "_operator" and ValueKind.TENSOR in kinds:
        return ValueKind.TENSOR
    return ValueKind.UNKNOWN


def _from_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    if module.startswith(("torch.nn.functional", "torch._C._nn", "torch.functional", "torch._C")):
        return True
    return getattr(torch._C._VariableFunctions, getattr(function, "__name__", ""), None) == function


# The attributes of parameters and buffers that stay the same while a pipeline lives.
_OF_PARAMETERS = frozenset({"shape", "size", "ndim", "dim", "numel", "dtype", "requires_grad"})


class Symbolic(Proxy):
    """A value that is not known yet."""

    tracer: Any  # this package's own

    @property  # type: ignore[misc]  # __setattr__ refuses to set it
    def __class__(self) -> type:
        if not _asks_for_class(sys._getframe(1)):
            return Symbolic
        kind = kind_of(self.node)
        if kind is ValueKind.UNKNOWN:
            raise TraceError("it asks for the class of a value, which is not known")
        return CLASS_OF[kind]

    def __getattr__(self, name: str) -> Any:
        tensor = self.tracer.tensor_of(self.node) if name in _OF_PARAMETERS else None
        if tensor is not None:
            value = getattr(tensor, name)
            self.tracer.attributes[tensor, name] = value
            return value
        certain = kind_of(self.node) is ValueKind.TENSOR and self.node.meta.get("certain", True)
        if certain and not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        return SymbolicAttribute(self, name)

    def __bool__(self) -> bool:
        if _is_asserted(sys._getframe(1)):
            self.tracer.create_proxy("call_function", hold, (self,), {})
            return True
        return self.tracer.to_bool(self)

    def __len__(self) -> int:
        raise TraceError("it asks for the length of a value, which is not known")

    def __contains__(self, _: object) -> bool:
        raise TraceError("it looks for something in a value, which is not known")

    def __index__(self) -> int:
        raise TraceError("it needs an integer, from a value that is not known")

    __int__ = __index__

    def __float__(self) -> float:
        raise TraceError("it needs a number, from a value that is not known")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", set_item, (self, index, value), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "root", "attr", "_node"):
            raise TraceError(f"it sets {name!r} of a value")
        super().__setattr__(name, value)


class SymbolicAttribute(Symbolic, Attribute):
    """An attribute of a value, or a method that is called next."""


def hold(condition: Any) -> None:
    """The ``assert`` of a traced forward."""
    if not condition:
        raise AssertionError("an assertion of the model does not hold")


def set_item(target: Any, index: Any, value: Any) -> Any:
    """Run ``target[index] = value``; return the target."""
    target[index] = value
    return target


def _in_place(name: str) -> Callable[[Symbolic, Any], Proxy]:
    function = getattr(operator, name)

    def run(self: Symbolic, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return run


IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul"
for _name in IN_PLACE.split():
    setattr(Symbolic, f"__{_name}__", _in_place(_name))


def _asks_for_class(frame: FrameType) -> bool:
    """Return whether the user's code asks for the class of a value, and not PyTorch's own.

    Functions of PyTorch in C ask in the name of their caller.
    """
    code = frame.f_code
    if not is_users(code.co_filename):
        return code.co_name == "is_tensor"
    line, _, column, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    text = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :]
    matching = dis.opname[code.co_code[frame.f_lasti]] == "MATCH_CLASS"
    return matching or not text or text.startswith((b"isinstance", b"issubclass"))


def _is_asserted(frame: FrameType) -> bool:
    code = list(dis.get_instructions(frame.f_code))
    here = next(k for k, step in enumerate(code) if step.offset == frame.f_lasti)
    jump = next((k for k in range(here, len(code)) if "JUMP" in code[k].opname), None)
    if jump is None or jump > here + 1 or "IF_TRUE" not in code[jump].opname:
        return False
    following = next(step for step in code[jump + 1 :] if step.opname not in ("NOT_TAKEN", "CACHE"))
    return following.opname == "LOAD_ASSERTION_ERROR" or following.argval == "AssertionError"


def pairs_in(tree: Any, values: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the nodes in the arguments of a step, with their values."""
    if isinstance(tree, fx.Node):
        yield tree, values
    elif isinstance(tree, slice):
        for name in ("start", "stop", "step"):
            yield from pairs_in(getattr(tree, name), getattr(values, name))
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from pairs_in(tree[key], values[key])
    elif isinstance(tree, list | tuple):
        for child, value in zip(tree, values, strict=True):
            yield from pairs_in(child, value)
