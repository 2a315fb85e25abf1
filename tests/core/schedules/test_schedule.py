from textwrap import dedent

import pytest

from lightning_gpipe.core.schedules.action import Action, Kind
from lightning_gpipe.core.schedules.placement import folded
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.table import (
    SCHEDULES,
    ScheduleName,
    fill_drain,
    schedule_for,
)
from tests.support.placements import one_each

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD


def drawn(picture: str) -> str:
    return dedent(picture).lstrip("\n")


def test_schedule_prints_as_its_table() -> None:
    assert str(fill_drain(1, one_each(2))) == drawn("""
        stage 0 | F0 .  .  B0
        stage 1 | .  F0 B0 .
    """)


def test_interleaved_is_clock_cycle_by_clock_cycle() -> None:
    order = fill_drain(2, one_each(2)).interleaved

    assert [f"{action}@{action.j}" for action in order] == [
        *("F0@0", "F1@0", "F0@1", "F1@1"),
        *("B1@1", "B1@0", "B0@1", "B0@0"),
    ]


def test_turns_are_the_sequence_by_worker() -> None:
    turns = fill_drain(2, one_each(2)).phase(0).turns_of((0, 1))

    assert [(worker, [f"{action}@{action.j}" for action in row]) for worker, row in turns] == [
        (0, ["F0@0", "F1@0"]),
        (1, ["F0@1", "F1@1"]),
    ]


def test_turns_by_stage() -> None:
    turns = fill_drain(2, one_each(2)).phase(1).turns_by_stage

    assert [(worker, [f"{action}@{action.j}" for action in row]) for worker, row in turns] == [
        (1, ["B1@1", "B0@1"]),
        (0, ["B1@0", "B0@0"]),
    ]


@pytest.mark.parametrize(
    "phase",
    [
        fill_drain(2, one_each(2)).phase(0),
        fill_drain(2, one_each(2), recomputed=1).phase(1),
        fill_drain(2, one_each(2), split=True).phase(1),
        fill_drain(2, one_each(2)).with_gradients.phase(1),
        schedule_for("1f1b", 2, one_each(2)).phase(0),
    ],
    ids=["forward", "recomputed", "split", "gradients", "by micro-batch"],
)
def test_other_phases_have_no_turns_by_stage(phase: Schedule) -> None:
    assert phase.turns_by_stage == ()


def test_workers_at_work_while_an_action_runs() -> None:
    schedule = fill_drain(3, one_each(2))
    forward, backward = (
        {f"{action}@{action.j}": number for action, number in schedule.phase(k).at_work.items()}
        for k in (0, 1)
    )

    assert [name for name, number in forward.items() if number == 1] == ["F0@0", "F2@1"]
    assert set(forward.values()) == {1, 2}
    assert [name for name, number in backward.items() if number == 1] == ["B2@1", "B0@0"]


def test_backward_has_two_clock_cycles() -> None:
    """Those of B0 on stage 1 are over when it comes to stage 0, which meanwhile waits."""
    at_work = schedule_for("1f1b", 2, one_each(2)).at_work

    # stage 0 | F0 F1 .  .  B0 B0 .  B1 B1
    # stage 1 | .  F0 B0 B0 F1 B1 B1 .  .
    alone = {action for action, number in at_work.items() if number == 1}
    assert alone == {Action(F, 0, 0), Action(B, 0, 1), Action(B, 1, 0)}


@pytest.fixture
def schedule() -> Schedule:
    return fill_drain(2, one_each(2), recomputed=1)


LOSS = {Action(F, 0, 1), Action(F, 1, 1)}


def needed(schedule: Schedule, action: Action) -> set[Action]:
    """What an action needs of what is in the rows."""
    return set(schedule.needs(action)) & set(schedule.interleaved)


def test_what_a_forward_needs(schedule: Schedule) -> None:
    assert needed(schedule, Action(F, 1, 0)) == set()
    assert needed(schedule, Action(F, 1, 1)) == {Action(F, 1, 0)}


def test_what_a_backward_needs(schedule: Schedule) -> None:
    own = {Action(F, 0, 0), Action(R, 0, 0)}

    assert needed(schedule, Action(B, 0, 1)) == LOSS | {Action(R, 0, 1)}
    assert needed(schedule, Action(B, 0, 0)) == LOSS | own | {Action(B, 0, 1)}


def test_recompute_needs_no_gradient(schedule: Schedule) -> None:
    assert needed(schedule, Action(R, 0, 0)) == LOSS | {Action(F, 0, 0)}


def test_micro_batch_with_a_loss_of_its_own_waits_for_no_other() -> None:
    schedule = schedule_for("1f1b", 3, one_each(2))

    assert needed(schedule, Action(B, 1, 1)) == {Action(F, 1, 1), Action(Kind.LOSS, 1, 2)}


def test_what_is_recomputed_is_read_off_the_rows() -> None:
    rows = ((Action(F, 0, 0), Action(F, 1, 0), Action(R, 1, 0), Action(B, 1, 0), Action(B, 0, 0)),)

    assert Schedule(2, (0,), (rows,)).recomputed(0) == {1}


def test_phase_of_an_action(schedule: Schedule) -> None:
    assert schedule.phase_of(Action(F, 1, 1)) == 0
    assert schedule.phase_of(Action(R, 0, 0)) == 1


def test_caller_stands_in_the_turns_as_one_more_worker() -> None:
    turns = schedule_for("1f1b", 1, one_each(2)).turns_of((0, 1))

    assert [(worker, *(f"{action}@{action.j}" for action in row)) for worker, row in turns] == [
        (2, "P0@-1"),
        (0, "F0@0"),
        (1, "F0@1"),
        (2, "L0@2"),
        (1, "B0@1"),
        (0, "B0@0"),
        (2, "B0@-1"),
    ]


def test_caller_is_in_the_phase_during_which_it_works() -> None:
    assert schedule_for("1f1b", 1, one_each(2)).phase_of(Action(Kind.LOSS, 0, 2)) == 0


def test_losses_come_late_in_a_process_without_the_last_stage() -> None:
    turns = schedule_for("1f1b", 3, one_each(2)).turns_of((0,))

    assert " ".join(str(action) for _, row in turns for action in row) == (
        "P0 F0 P1 F1 L0 B0 P2 F2 L1 B1 L2 B2 B0 B1 B2"
    )


# Gradients that go home.


def test_gradients_of_a_stage_leave_after_its_last_backward() -> None:
    assert str(schedule_for("1f1b", 3, one_each(2)).with_gradients) == drawn("""
        stage 0 | F0 F1 .  B0 F2 B1 .  B2 G2
        stage 1 | .  F0 B0 F1 B1 F2 B2 G2 .
        caller  | P0 P1 L0 P2 L1 L2 B0 B1 B2
    """)


def test_gradients_leave_after_the_last_weights_and_in_the_phase_of_backwards() -> None:
    schedule = fill_drain(2, one_each(2), split=True).with_gradients

    assert str(schedule) == drawn("""
        stage 0 | F0 F1 .  .  B1 W1 B0 W0 G0
        stage 1 | .  F0 F1 B1 W1 B0 W0 G0 .
    """)
    assert not any(a.kind is Kind.GRADIENTS for row in schedule.phases[0] for a in row)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_gradients_that_leave_change_nothing_else(kind: ScheduleName) -> None:
    schedule = schedule_for(kind, 4, folded(4, 2) if SCHEDULES[kind].folded else one_each(4))
    leaving = schedule.with_gradients

    assert [action.kind for action in leaving.interleaved].count(Kind.GRADIENTS) == 4
    assert leaving.simulation.makespan == schedule.simulation.makespan
    assert leaving.bubble == schedule.bubble
