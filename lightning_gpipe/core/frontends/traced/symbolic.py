"""The values that a traced forward computes with, which record its operations.

torch.fx has such a value; three things are different here. It never turns ``x += y`` into
``x = x + y``. An ``assert`` is recorded. And Python's ``isinstance`` gets the class of a value
where that is certain, and is refused where it is not.
"""

from __future__ import annotations

import dis
import linecache
import operator
import sys
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

from torch import Tensor
from torch.fx.proxy import Attribute, Proxy, TraceError

from lightning_gpipe.core.frontends.lines import is_users
from lightning_gpipe.core.frontends.traced.traced_values import CLASS_OF, ValueKind, kind_of

# The attributes of parameters and buffers that stay the same while a pipeline lives.
_OF_PARAMETERS = frozenset({"shape", "size", "ndim", "dim", "numel", "dtype", "requires_grad"})


class Symbolic(Proxy):
    """A value that is not known yet."""

    tracer: Any  # this package's own

    @property
    def __class__(self) -> type:
        if not _asks_for_class(sys._getframe(1)):
            return Symbolic
        kind = kind_of(self.node)
        if kind is ValueKind.UNKNOWN:
            raise TraceError("it asks for the class of a value, which is not known")
        return CLASS_OF[kind]

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("the class of a traced value cannot be changed")

    def __getattr__(self, name: str) -> Any:
        tensor = self.tracer.tensor_of(self.node) if name in _OF_PARAMETERS else None
        if tensor is not None:
            return getattr(tensor, name)
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

    The functions of PyTorch that are written in C ask in the name of their caller.
    """
    code = frame.f_code
    if not is_users(code.co_filename):
        return code.co_name == "is_tensor"
    line, _, column, _ = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    text = linecache.getline(code.co_filename, line or 0).encode()[column or 0 :]
    matching = dis.opname[code.co_code[frame.f_lasti]] == "MATCH_CLASS"
    return matching or not text or text.startswith((b"isinstance", b"issubclass"))


def _is_asserted(frame: FrameType) -> bool:
    """Return whether the frame now evaluates the condition of an ``assert``."""
    code = list(dis.get_instructions(frame.f_code))
    here = next(k for k, step in enumerate(code) if step.offset == frame.f_lasti)
    jump = next((k for k in range(here, len(code)) if "JUMP" in code[k].opname), None)
    if jump is None or jump > here + 1 or "IF_TRUE" not in code[jump].opname:
        return False
    following = next(step for step in code[jump + 1 :] if step.opname not in ("NOT_TAKEN", "CACHE"))
    return following.opname == "LOAD_ASSERTION_ERROR" or following.argval == "AssertionError"
