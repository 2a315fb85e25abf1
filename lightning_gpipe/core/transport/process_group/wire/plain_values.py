"""Pickling of values that cannot run code in the process that receives them.

A pickle calls whatever functions it names. Here it may name plain classes of Python, NumPy and
PyTorch, and those given to :func:`torch.serialization.add_safe_globals`. An object that only has
fields or items, such as a dataclass, a named tuple or a mapping, is made without a call of its
class: the class is looked up among the imported ones, and the object gets the fields.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache, reduce
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch

from lightning_gpipe.core.data import is_registered, spec_of, spec_parts

_PLAIN = {
    "builtins": "Ellipsis bool bytearray bytes complex dict float frozenset int list range set "
    "slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "tokenizers": "Encoding",  # of a BatchEncoding
    "torch": "Size device",
    "types": "SimpleNamespace",
    "uuid": "UUID",
}
_KINDS = (tuple, Mapping, Enum, torch.Tensor)  # of records, beside dataclasses
_IMMUTABLE = 1 << 8  # the flag of such a type, Py_TPFLAGS_IMMUTABLETYPE
_MAKING = "__new__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__"


class ClassName(NamedTuple):
    """A class, by its name: unlike the class itself, nobody can call it."""

    module: str
    name: str

    @classmethod
    def of(cls, kind: Any) -> ClassName:
        return cls(kind.__module__, kind.__qualname__)

    @property
    def is_plain(self) -> bool:
        if _is_plain(*self):
            return True
        safe = torch.serialization.get_safe_globals()  # some with a name of the user's choice
        return any(self == self.of(x[0] if isinstance(x, tuple) else x) for x in safe)

    def look_up(self) -> Any:
        """Return the class, which must be one of records, tensors or plain values."""
        try:
            names = self.name.split(".")
            found = reduce(lambda owner, name: vars(owner)[name], names, sys.modules[self.module])
        except (KeyError, TypeError):
            raise pickle.PicklingError(
                f"{self.module}.{self.name} is not known here. Define it at the top of a module, "
                "and import that in all processes"
            ) from None
        if not isinstance(found, type) or not (self.is_plain or is_record(found)):
            raise self.refusal()
        return found

    def refusal(self) -> pickle.PickleError:
        return pickle.PicklingError(
            f"{self.module}.{self.name} is not among them. If it is safe to make from what another "
            f"process sends, write torch.serialization.add_safe_globals([{self.name}]) in all "
            "processes; a dataclass needs none"
        )


class PlainPickler(pickle.Pickler):
    """Pickles what :class:`PlainUnpickler` makes, and refuses the rest."""

    def reducer_override(self, value: Any) -> Any:
        if (parts := spec_parts(value)) is not None:
            return _spec, _with_names(parts)
        if isinstance(value, ClassName):
            return _name, tuple(value)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            if not ClassName.of(value).is_plain:
                raise ClassName.of(value).refusal()
        elif _is_mutable(type(value)):
            return _parts(value, ClassName.of(type(value)))
        return NotImplemented


class PlainUnpickler(pickle.Unpickler):
    """Makes plain values, and records of the classes that are imported here."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function that a pickle may call, but not change."""
        if not ClassName(module, name).is_plain:
            raise ClassName(module, name).refusal()
        found = super().find_class(module, name)
        by_python = (
            _is_mutable(found) if isinstance(found, type) else isinstance(found, FunctionType)
        )
        return found.__call__ if by_python else found


@lru_cache(maxsize=256)
def _is_plain(module: str, name: str) -> bool:
    """Return True if a pickle may call a class or a function without the user's permission."""
    if (module, name) in _OWN or name in _PLAIN.get(module, "").split():
        return True
    if module not in ("torch", "torch.return_types"):
        return False
    found = vars(sys.modules[module]).get(name)
    return isinstance(found, torch.dtype) or hasattr(found, "n_sequence_fields")


def is_record(cls: type) -> bool:
    """Return True if objects of a class are made of fields or items only."""
    return _has_fields_only(cls) or is_registered(cls)


@lru_cache(maxsize=256)
def _has_fields_only(cls: type) -> bool:
    if hasattr(cls, "__del__") or hasattr(cls, "n_sequence_fields"):
        return False
    by_fields = all(getattr(cls, name, None) is getattr(object, name, None) for name in _MAKING)
    return by_fields or is_dataclass(cls) or issubclass(cls, _KINDS)


def _is_mutable(cls: type) -> bool:
    return not cls.__flags__ & _IMMUTABLE


def _parts(value: Any, name: ClassName) -> Any:
    """Return how a record is made, in the form of ``__reduce_ex__``."""
    if not (is_record(type(value)) or name.is_plain):
        raise name.refusal()
    if isinstance(value, Enum):
        return _record, (name, value.value)
    if isinstance(value, tuple):
        return _record, (name, *_with_names(value)), getattr(value, "__dict__", None)
    function, arguments, *rest = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    has_fields = is_dataclass(value) and rest and rest[0]  # that the arguments are made of
    by_call = function is type(value) and arguments and not has_fields
    if by_call or function not in (copyreg.__newobj__, type(value)):  # type: ignore[attr-defined]
        if name.is_plain:
            return NotImplemented
        raise name.refusal()
    return _record, (name,), *rest


def _record(name: ClassName, *values: Any) -> Any:
    """Return a record without its fields, or a tuple of these values."""
    cls = name.look_up()
    if issubclass(cls, Enum):
        return cls(*values)
    return tuple.__new__(cls, _with_classes(values)) if issubclass(cls, tuple) else cls.__new__(cls)


def _name(module: str, name: str) -> ClassName:
    return ClassName(module, name)


def _spec(*parts: Any) -> Any:
    return spec_of(*_with_classes(parts))


def _with_names(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(ClassName.of(x) if isinstance(x, type) else x for x in values)


def _with_classes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.look_up() if isinstance(x, ClassName) else x for x in values)


_OWN = {ClassName.of(each) for each in (_name, _record, _spec)}
