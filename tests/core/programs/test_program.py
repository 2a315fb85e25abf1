"""The values that travel between the stages of a program follow from its steps.

Here are also the tests of ``route``.
"""

from __future__ import annotations

import operator
from textwrap import dedent

import pytest

from lightning_gpipe.core.programs.program import Program
from lightning_gpipe.core.programs.route import Route, Value, Values
from lightning_gpipe.core.programs.step import Step
from lightning_gpipe.core.schedules.action import CALLER


def step(value: int, stage: int, *needs: int) -> Step:
    return Step(sum, (tuple(map(Value, needs)),), value, stage, name="sum")


def example() -> Program:
    """An input and a mask for all blocks, on three stages; the first block's output is wanted."""
    mask = Value(1)
    return Program(
        [
            Step(operator.add, (Value(0),), 2, 0, {"mask": mask}, "blocks.0"),
            Step(operator.add, (Value(2),), 3, 0, {"mask": mask}, "blocks.1"),
            Step(operator.add, (Value(3),), 4, 1, {"mask": mask}, "blocks.2"),
            Step(operator.add, (Value(4), [Value(3), 1]), 5, 2, name="blocks.3"),
        ],
        inputs=[0, 1],
        outputs=[5, 2],
        n=3,
    )


def test_program_prints_as_its_steps():
    assert f"{example()}\n" == dedent("""\
        %0 <- caller
        %1 <- caller
        %2 <- stage 0: blocks.0(%0, mask=%1)
        %3 <- stage 0: blocks.1(%2, mask=%1)
        %4 <- stage 1: blocks.2(%3, mask=%1)
        %5 <- stage 2: blocks.3(%4, [%3, 1])
        caller <- %5, %2
    """)


def test_value_for_the_next_stage_goes_with_the_micro_batch():
    parts = example().parts
    assert [part.takes for part in parts] == [(0, 1), (3,), (4,)]
    assert [part.gives for part in parts] == [(3,), (4,), (5,)]


def test_value_for_another_stage_goes_straight():
    parts = example().parts
    assert parts[0].leaving == (Route(Values((3,)), 0, 2), Route(Values((2,)), 0, 3))
    assert parts[1].arriving == (Route(Values((1,)), CALLER, 1),)
    assert parts[2].arriving == (Route(Values((3,)), 0, 2),)


def test_values_that_go_the_same_way_share_a_route():
    steps = [step(2, 0, 0), step(3, 0, 2), step(4, 1, 3), step(5, 2, 4, 2, 3, 1, 0)]
    program = Program(steps, inputs=[0, 1], outputs=[2, 5, 3], n=3)
    assert program.parts[0].leaving == (Route(Values((2, 3)), 0, 2), Route(Values((2, 3)), 0, 3))
    assert program.parts[2].arriving == (
        Route(Values((0, 1)), CALLER, 2),
        program.parts[0].leaving[0],
    )
    assert program.given == (Route(Values((0, 1)), CALLER, 2),)
    assert program.returned == (Route(Values((2, 3)), 0, 3),)


def test_caller_gives_and_gets_by_the_same_routes():
    program = example()
    assert program.first == (0, 1)
    assert program.given == (Route(Values((1,)), CALLER, 1),)
    assert program.returned == (Route(Values((2,)), 0, 3),)


def test_value_is_dropped_after_the_last_step_that_needs_it():
    first, second, third = example().parts
    assert [set(dropped) for dropped in first.drops] == [{0}, {1}]
    assert [set(dropped) for dropped in second.drops] == [{1, 3}]
    assert [set(dropped) for dropped in third.drops] == [{3, 4}]


def test_value_that_nothing_needs_is_dropped_at_once():
    program = Program([step(1, 0, 0), step(2, 0, 0)], inputs=[0], outputs=[2], n=1)
    assert program.parts[0].drops == ((1,), (0,))


def test_step_that_needs_a_value_of_a_later_stage():
    with pytest.raises(ValueError, match="earlier steps .* before %1 is made"):
        Program([step(1, 1, 0), step(2, 0, 1)], inputs=[0], outputs=[2], n=2)


def test_output_that_no_step_makes():
    with pytest.raises(ValueError, match="outputs must be made by steps: got %7, made by none"):
        Program([step(1, 0, 0)], inputs=[0], outputs=[7], n=1)
    with pytest.raises(ValueError, match="outputs must be made by steps: got %0, an input"):
        Program([step(1, 0, 0)], inputs=[0], outputs=[1, 0], n=1)


def test_parts_with_the_same_calls_have_the_same_signature():
    assert example().parts[0].signature == example().parts[0].signature
    assert example().parts[0].signature != example().parts[1].signature


def test_programs_with_other_constants_have_another_checksum():
    one, same, other = (
        Program([Step(operator.add, (Value(0), [k]), 1, 0)], inputs=[0], outputs=[1], n=1)
        for k in (1.0, 1.0, 1.5)
    )

    assert one.checksum == same.checksum != other.checksum
    assert one.fingerprint == other.fingerprint
