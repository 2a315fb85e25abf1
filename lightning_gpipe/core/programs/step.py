"""Steps of a program, each one call on inputs of the program and results of earlier steps.

A step that looks up its arguments takes as long as a small operator on a CPU. So the steps of a
stage are compiled to a function whose local variables are the values, with a line for each step::

    def run(takes, arriving, after):
        v0 = takes
        [v1] = arriving
        v2 = r0(v0, mask=v1); del v0
        v3 = r1(v2, (v1, c1), mask=v1); del v1, v2
        return [flat(v3)]

The callables and the constants are its global variables, so the text has no names of the user's
but those of arguments and of methods. Where all steps are layers, it calls ``after`` with the title
of each, so that an edit in place is known by the layer that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from keyword import iskeyword
from typing import Any, Protocol

from torch import nn

from lightning_gpipe.core.data import FlatTree, joined, tree_flatten
from lightning_gpipe.core.programs.route import Value


class StepTrial(Protocol):
    """Calls a function, and checks it."""

    @property
    def is_over(self) -> bool: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Step:
    """One call.

    Attributes:
        args, kwargs: Its arguments: constants, placeholders for values, and containers of both.
        value: The number of its result.
        name: The name in the user's model, such as ``blocks.3``.
        line: The line of the user's code that made the call, such as ``model.py:7``, if known.
        then: Converts the result of ``run`` to the value; None if it is the value.
        trial: Called in the place of ``run`` until it is over; None if there is none.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    value: int
    stage: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    line: str = ""
    then: Callable[[Any], Any] | None = None
    trial: StepTrial | None = None

    @property
    def now(self) -> Callable[..., Any]:
        """The function to call: ``run``, or its trial."""
        return self.run if self.trial is None or self.trial.is_over else self.trial

    @cached_property
    def title(self) -> str:
        """The title in errors, such as ``blocks.3 (Block)``."""
        kind = f" ({type(self.run).__name__})" if isinstance(self.run, nn.Module) else ""
        return f"{self.name}{kind}"

    @cached_property
    def needs(self) -> frozenset[int]:
        return frozenset(value.number for value in values_in((self.args, self.kwargs)))

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        return tuple(_constants_in((self.args, self.kwargs)))

    def __call__(self, values: Mapping[int, Any]) -> Any:
        """Make the call by itself, with the values of these numbers."""
        args = [_filled(arg, values) for arg in self.args]
        kwargs = {key: _filled(arg, values) for key, arg in self.kwargs.items()}
        function = self.run if self.trial is None else self.now
        result = function(*args, **kwargs)
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


# Takes what comes with the micro-batch, what comes by each route (one value, or several in a list),
# and a function to call with the title of each layer; returns what goes on and what leaves by each
# route.
Call = Callable[[Any, Sequence[Any], Callable[[str], None]], list[FlatTree]]

_FIRST = 4  # the line of the first step


class Function:
    """Calls steps in order, and ``after`` each if all are layers.

    ``drops`` has for each step the values that nothing needs after it; ``inputs`` and ``outputs``
    are those that come and go with the micro-batch, then those of each route.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        drops: Sequence[Sequence[int]],
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
    ) -> None:
        self._steps = steps
        self.names_layers = all(isinstance(step.run, nn.Module) for step in steps)
        names: dict[str, Any] = {"flat": tree_flatten, "joined": joined}
        lines = [
            "def run(takes, arriving, after):",
            f"    {_way(inputs[0])} = takes",
            f"    [{', '.join(map(_way, inputs[1:]))}] = arriving",
        ]
        for k, (step, dropped) in enumerate(zip(steps, drops, strict=True)):
            lines.append(f"    v{step.value} = {_call(k, step, names)}")
            if dropped:
                lines[-1] += f"; del {', '.join(f'v{number}' for number in dropped)}"
            if self.names_layers:
                lines[-1] += f"; after({step.title!r})"
        lines.append(f"    return [{', '.join(map(_tree, outputs))}]")
        exec("\n".join(lines), names)
        self.call: Call = names["run"]
        self._code = names["run"].__code__

    def step_of(self, error: BaseException) -> Step | None:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code is not self._code:
            traceback = traceback.tb_next
        k = -1 if traceback is None else traceback.tb_lineno - _FIRST
        return self._steps[k] if 0 <= k < len(self._steps) else None


def _way(numbers: Iterable[int]) -> str:
    """The values of one way: a variable, or a list."""
    names = [f"v{number}" for number in numbers]
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _tree(numbers: Iterable[int]) -> str:
    """The values that leave on one way, flattened."""
    way = _way(numbers)
    return f"joined({way})" if way.startswith("[") else f"flat({way})"


def _call(k: int, step: Step, names: dict[str, Any]) -> str:
    """The text of a step's call; its callables and constants are added to the names."""
    arguments = [_text(arg, names) for arg in step.args]
    if all(map(_is_name, step.kwargs)):
        arguments += [f"{key}={_text(arg, names)}" for key, arg in step.kwargs.items()]
    else:
        arguments.append(f"**{_text(dict(step.kwargs), names)}")
    run, function = f"r{k}", step.now
    if type(function) is Method and step.args and _is_name(function.name):
        run = f"{arguments.pop(0)}.{function.name}"
    else:
        names[run] = function
    call = f"{run}({', '.join(arguments)})"
    if step.then is None:
        return call
    names[f"t{k}"] = step.then
    return f"t{k}({call})"


def _is_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text)


def _text(tree: Any, names: dict[str, Any]) -> str:
    kind = type(tree)
    if kind is Value:
        return f"v{tree.number}"
    if not has_values(tree):
        name = f"c{len(names)}"
        names[name] = tree
        return name
    if kind is dict:
        return f"{{{', '.join(f'{_text(k, names)}: {_text(x, names)}' for k, x in tree.items())}}}"
    if kind is slice:
        return f"slice({', '.join(_text(x, names) for x in (tree.start, tree.stop, tree.step))})"
    inner = "".join(f"{_text(child, names)}, " for child in tree)
    if kind is list:
        return f"[{inner}]"
    return f"({inner})" if kind is tuple else f"{_text(kind, names)}({inner})"
