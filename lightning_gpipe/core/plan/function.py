"""The steps of one stage as one Python function.

A step that looks up its arguments takes as long as a small operator on a CPU, and a traced forward
has thousands of them in every micro-batch. So the steps of a stage that run again and again are
written as a function, whose local variables are the values, each step in a line of its own::

    def run(takes, arriving):
        [v0] = takes
        [[v1]] = arriving
        v2 = r0(v0, mask=v1); del v0
        v3 = r1(v2, (v1, c1), mask=v1); del v1, v2
        return [v3], []

What it calls and its constants are in the variables of its module, so that nothing of a user's is
in the text but the names of arguments and of methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from keyword import iskeyword
from typing import Any

from lightning_gpipe.core.plan.route import Value
from lightning_gpipe.core.plan.step import Method, Step, values_in

# Called with the values that come with the micro-batch and those of each route that arrives;
# returns those that go on with it and those of each route that leaves.
Call = Callable[[Sequence[Any], Sequence[Sequence[Any]]], tuple[list[Any], list[list[Any]]]]

_FIRST = 4  # the line of the first step


class Function:
    """Calls steps in order.

    Args:
        steps: The steps.
        drops: For each step, the values that nothing needs after it.
        takes, gives: The numbers of the values that come and go with the micro-batch.
        arriving, leaving: For each route, those of the values that it carries.

    Attributes:
        call: Calls the steps.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        drops: Sequence[Sequence[int]],
        *,
        takes: Iterable[int],
        arriving: Iterable[Iterable[int]],
        gives: Iterable[int],
        leaving: Iterable[Iterable[int]],
    ) -> None:
        self._steps = steps
        names: dict[str, Any] = {}
        lines = [
            "def run(takes, arriving):",
            f"    {_list(takes)} = takes",
            f"    {_lists(arriving)} = arriving",
        ]
        for k, (step, dropped) in enumerate(zip(steps, drops, strict=True)):
            lines.append(f"    v{step.value} = {_call(k, step, names)}")
            if dropped:
                lines[-1] += f"; del {', '.join(f'v{number}' for number in dropped)}"
        lines.append(f"    return {_list(gives)}, {_lists(leaving)}")
        exec("\n".join(lines), names)
        self.call: Call = names["run"]
        self._code = names["run"].__code__

    def step_of(self, error: BaseException) -> Step | None:
        """The step that raised an error."""
        found = error.__traceback__
        while found is not None and found.tb_frame.f_code is not self._code:
            found = found.tb_next
        k = -1 if found is None else found.tb_lineno - _FIRST
        return self._steps[k] if 0 <= k < len(self._steps) else None


def _list(numbers: Iterable[int]) -> str:
    return f"[{', '.join(f'v{number}' for number in numbers)}]"


def _lists(numbers: Iterable[Iterable[int]]) -> str:
    return f"[{', '.join(map(_list, numbers))}]"


def _call(k: int, step: Step, names: dict[str, Any]) -> str:
    """The text of a step's call; what it refers to is added to the names."""
    given = [_text(each, names) for each in step.args]
    if all(map(_is_name, step.kwargs)):
        given += [f"{key}={_text(each, names)}" for key, each in step.kwargs.items()]
    else:
        given.append(f"**{_text(dict(step.kwargs), names)}")
    run = f"r{k}"
    if type(step.run) is Method and step.args and _is_name(step.run.name):
        run = f"{given.pop(0)}.{step.run.name}"
    else:
        names[run] = step.run
    made = f"{run}({', '.join(given)})"
    if step.then is None:
        return made
    names[f"t{k}"] = step.then
    return f"t{k}({made})"


def _is_name(text: str) -> bool:
    return text.isidentifier() and not iskeyword(text)


def _text(tree: Any, names: dict[str, Any]) -> str:
    """The text of an argument."""
    kind = type(tree)
    if kind is Value:
        return f"v{tree.number}"
    if not any(True for _ in values_in(tree)):
        name = f"c{len(names)}"
        names[name] = tree
        return name
    if kind is dict:
        return f"{{{', '.join(f'{_text(k, names)}: {_text(x, names)}' for k, x in tree.items())}}}"
    if kind is slice:
        return f"slice({', '.join(_text(x, names) for x in (tree.start, tree.stop, tree.step))})"
    inner = "".join(f"{_text(each, names)}, " for each in tree)
    if kind is list:
        return f"[{inner}]"
    return f"({inner})" if kind is tuple else f"{_text(kind, names)}({inner})"
