"""A step of a program: one call, on inputs of the program and results of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from lightning_gpipe.core.programs.route import Value


@dataclass(frozen=True, eq=False)
class Step:
    """One call.

    Attributes:
        run: The function or module that is called.
        args, kwargs: Its arguments: constants, placeholders for values, and tuples, lists, dicts
            and slices of both.
        value: The number of its result.
        stage: The stage that runs it.
        name: The name in the user's model, such as ``blocks.3``.
        line: The line of the user's code that made the call, such as ``model.py:7``, if known.
        then: Converts the result of ``run`` to the value; None if it is the value.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    value: int
    stage: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    line: str = ""
    then: Callable[[Any], Any] | None = None

    @cached_property
    def title(self) -> str:
        """The title in errors, such as ``blocks.3 (Block)``."""
        kind = f" ({type(self.run).__name__})" if isinstance(self.run, nn.Module) else ""
        return f"{self.name}{kind}"

    @cached_property
    def needs(self) -> frozenset[int]:
        """The numbers of the values among its arguments."""
        return frozenset(value.number for value in values_in((self.args, self.kwargs)))

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """The numbers and strings among its arguments."""
        return tuple(_constants_in((self.args, self.kwargs)))

    def __call__(self, values: Mapping[int, Any]) -> Any:
        """Make the call by itself, with the values of these numbers."""
        args = [_filled(arg, values) for arg in self.args]
        kwargs = {key: _filled(arg, values) for key, arg in self.kwargs.items()}
        result = self.run(*args, **kwargs)
        return result if self.then is None else self.then(result)

    def __str__(self) -> str:
        arguments = [_shown(arg) for arg in self.args]
        arguments += [f"{key}={_shown(arg)}" for key, arg in self.kwargs.items()]
        return f"%{self.value} <- stage {self.stage}: {self.name}({', '.join(arguments)})"


@dataclass
class Method:
    """Calls the method of this name of its first argument."""

    name: str

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def values_in(tree: Any) -> Iterator[Value]:
    """Yield the values in arguments of a step."""
    if isinstance(tree, Value):
        yield tree
    for child in _children(tree):
        yield from values_in(child)


def _constants_in(tree: Any) -> Iterator[Any]:
    if isinstance(tree, int | float | complex | str | None):
        yield tree
    for child in _children(tree):
        yield from _constants_in(child)


def has_values(tree: Any) -> bool:
    """Return whether a value is in arguments of a step."""
    return next(values_in(tree), None) is not None


def _filled(tree: Any, values: Mapping[int, Any]) -> Any:
    kind = type(tree)
    if kind is Value:
        return values[tree.number]
    if not has_values(tree):
        return tree
    children = [_filled(child, values) for child in _children(tree)]
    if kind is dict:
        return dict(zip(tree, children, strict=True))
    return kind(children) if kind in (tuple, list) else kind(*children)  # a slice, a named tuple


def _children(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Value):
        return ()
    if isinstance(tree, tuple | list):
        return tree
    if type(tree) is dict:
        return tree.values()
    return (tree.start, tree.stop, tree.step) if isinstance(tree, slice) else ()


def _shown(tree: Any) -> str:
    if isinstance(tree, Value):
        return str(tree)
    children = list(_children(tree))
    if children and isinstance(tree, tuple | list):
        inner = ", ".join(map(_shown, children))
        return f"({inner})" if isinstance(tree, tuple) else f"[{inner}]"
    return repr(tree) if isinstance(tree, int | float | str | bool | None) else type(tree).__name__
