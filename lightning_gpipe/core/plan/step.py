"""A step of a program: one call, on values that the caller gave or an earlier step made.

In its arguments a :class:`~lightning_gpipe.core.plan.route.Value` stands for what the value is when
the step runs, by itself or within tuples, lists, dicts and slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from lightning_gpipe.core.plan.route import Value


@dataclass(frozen=True, eq=False)
class Step:
    """One call.

    Attributes:
        run: What is called.
        args, kwargs: Its arguments: constants, values, and tuples, lists, dicts and slices of both.
        value: The number of its result.
        stage: The stage that it belongs to.
        name: What it is to the user, such as ``blocks.3``.
        line: The line of the user's code that made the call, such as ``model.py:7``, if known.
        then: Makes the value of what ``run`` returned; None if that is it.
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
        """What errors call it, such as ``blocks.3 (Block)``."""
        kind = f" ({type(self.run).__name__})" if isinstance(self.run, nn.Module) else ""
        return f"{self.name}{kind}"

    @cached_property
    def needs(self) -> frozenset[int]:
        """The numbers of the values among its arguments."""
        return frozenset(each.number for each in values_in((self.args, self.kwargs)))

    @cached_property
    def _flat(self) -> bool:
        """Whether all values are arguments themselves, and none is in a tuple or a list."""
        given = [*self.args, *self.kwargs.values()]
        return all(type(each) is Value or not any(True for _ in values_in(each)) for each in given)

    def __call__(self, values: Mapping[int, Any]) -> Any:
        """Call it with the values of these numbers."""
        result = self._result(values)
        return result if self.then is None else self.then(result)

    def _result(self, values: Mapping[int, Any]) -> Any:
        """What ``run`` returns."""
        if not self._flat:
            args = [filled(each, values) for each in self.args]
            kwargs = {key: filled(each, values) for key, each in self.kwargs.items()}
            return self.run(*args, **kwargs)
        # Most steps, and a traced forward has very many.
        args = [values[each.number] if type(each) is Value else each for each in self.args]
        if not self.kwargs:
            return self.run(*args)
        kwargs = {
            key: values[each.number] if type(each) is Value else each
            for key, each in self.kwargs.items()
        }
        return self.run(*args, **kwargs)

    def __str__(self) -> str:
        given = [_shown(each) for each in self.args]
        given += [f"{key}={_shown(each)}" for key, each in self.kwargs.items()]
        return f"%{self.value} <- stage {self.stage}: {self.name}({', '.join(given)})"


class Method:
    """Calls a method of its first argument.

    Args:
        name: The name of the method.

    Attributes:
        name: As given.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def values_in(tree: Any) -> Iterator[Value]:
    """The values in arguments of a step."""
    if isinstance(tree, Value):
        yield tree
    for each in _children(tree):
        yield from values_in(each)


def filled(tree: Any, values: Mapping[int, Any]) -> Any:
    """The tree with what ``values`` has for its values."""
    kind = type(tree)
    if kind is Value:
        return values[tree.number]
    if kind is tuple or kind is list:
        return kind([filled(each, values) for each in tree])
    if kind is dict:
        return {key: filled(each, values) for key, each in tree.items()}
    if kind is slice:
        return slice(*(filled(each, values) for each in _children(tree)))
    if isinstance(tree, tuple) and any(True for _ in values_in(tree)):
        return kind(*(filled(each, values) for each in tree))  # a named one
    return tree


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
