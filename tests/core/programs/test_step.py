"""A step is called with what its arguments say."""

from __future__ import annotations

from lightning_gpipe.core.programs.route import Value
from lightning_gpipe.core.programs.step import Step


def test_step_is_called_with_values_wherever_they_are_in_its_arguments():
    got = []

    def run(*args: object, **kwargs: object) -> None:
        got.append((args, kwargs))

    tree = (Value(0), [Value(1), "a"], {"k": Value(0)}, slice(Value(1), None), 7)
    Step(run, tree, 2, 0, {"key": (Value(1),)})({0: "zero", 1: 1})

    assert got == [(("zero", [1, "a"], {"k": "zero"}, slice(1, None), 7), {"key": (1,)})]


def test_step_whose_values_are_arguments_themselves():
    got = []

    def run(*args: object, **kwargs: object) -> None:
        got.append((args, kwargs))

    Step(run, (Value(1), (2, 3)), 4, 0)({1: "one"})
    Step(run, (), 4, 0, {"x": Value(1), "k": 7})({1: "one"})

    assert got == [(("one", (2, 3)), {}), ((), {"x": "one", "k": 7})]


def test_value_is_made_of_what_was_returned():
    assert Step(max, (Value(0), 2), 1, 0, then=str)({0: 7}) == "7"


def test_constants_are_numbers_and_strings_wherever_they_are_in_arguments():
    tree = (Value(7), [1, "a"], {"k": 2.5}, slice(None, Value(1)), object())

    assert Step(max, tree, 2, 0, {"key": (True,)}).constants == (1, "a", 2.5, None, None, True)
