"""Steps that are written as a function are called as one after another."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe.core.data import tree_unflatten
from lightning_gpipe.core.programs.route import Value
from lightning_gpipe.core.programs.step import Function, Method, Step

Pair = namedtuple("Pair", "one other")


def nobody(title: str) -> None:
    """Hear of a layer."""


def returned(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((Value(0), Value(1)), {"mask": Value(1)}),
        ((7, "v0", None, Value(0)), {"k": ...}),
        (((Value(0),), [Value(1), "a"], {"k": Value(0), 3: 4}), {"pair": (1, (Value(1), 2))}),
        ((slice(Value(1), None, 2), slice(3)), {"class": Value(0), "a b": 1}),
        ((Pair(Value(0), 3), Pair(1, 2)), {}),
        (([], (), {}), {"print": Value(0), "r0": 1, "v1": 2}),
    ],
)
def test_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    step = Step(returned, args, 2, 0, kwargs)
    function = Function([step], [()], [[0], [1]], [[2], [0, 2]])

    result, leaving = map(tree_unflatten, function.call("zero", [1], nobody))

    assert result == step({0: "zero", 1: 1})
    assert leaving == ["zero", result]


def test_value_is_made_of_what_was_returned() -> None:
    steps = [Step(max, (Value(0), 2), 1, 0, then=str), Step(returned, (Value(1),), 2, 0)]
    function = Function(steps, [(), ()], [[0]], [[1, 2]])

    [made] = function.call(7, [], nobody)
    assert tree_unflatten(made) == ["7", (("7",), {})]


def test_value_is_dropped_after_the_step_that_needs_it_last() -> None:
    class Held:
        alive = 0

        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    steps = [
        Step(Held, (), 0, 0),
        Step(id, (Value(0),), 1, 0),
        Step(lambda: Held.alive, (), 2, 0),
    ]
    function = Function(steps, [(), (0, 1), ()], [[]], [[2]])
    [made] = function.call([], [], nobody)
    assert tree_unflatten(made) == 0


def test_step_that_raised_an_error() -> None:
    steps = [Step(returned, (), k, 0, name=f"step {k}") for k in range(3)]
    steps[1] = Step(lambda: 1 / 0, (), 1, 0)
    function = Function(steps, [()] * 3, [[]], [[2]])

    with pytest.raises(ZeroDivisionError) as caught:
        function.call([], [], nobody)
    assert function.step_of(caught.value) is steps[1]

    with pytest.raises(ValueError) as outside:
        function.call([1], [], nobody)
    assert function.step_of(outside.value) is None


def test_methods_are_called_on_what_they_are_of() -> None:
    steps = [
        Step(Method("upper"), (Value(0),), 1, 0),
        Step(Method("join"), ("-", [Value(1), "b"]), 2, 0),
        Step(Method("a b"), (Value(0),), 3, 0),
    ]
    function = Function(steps[:2], [()] * 2, [[0]], [[1, 2]])
    [made] = function.call("a", [], nobody)
    assert tree_unflatten(made) == ["A", "A-b"]

    function = Function(steps[2:], [()], [[0]], [[3]])
    with pytest.raises(AttributeError, match="a b"):
        function.call("a", [], nobody)


def test_layers_are_told_of_one_by_one() -> None:
    titles: list[str] = []
    layers = nn.ReLU(), nn.Tanh()
    steps = [Step(layers[k], (Value(k),), k + 1, 0, name=f"layer {k}") for k in range(2)]
    function = Function(steps, [(0,), (1,)], [[0]], [[2]])

    assert function.names_layers
    function.call(torch.zeros(1), [], titles.append)
    assert titles == ["layer 0 (ReLU)", "layer 1 (Tanh)"]
