import pytest

from lightning_gpipe.core.schedules.action import Action, Kind, predecessors, successor

F, R, B, W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHTS
P, L = Kind.PREPARE, Kind.LOSS


def test_action_prints_its_letter_and_micro_batch() -> None:
    letters = [str(Action(kind, 3, 1)) for kind in Kind]

    assert letters == ["F3", "R3", "B3", "W3", "P3", "L3", "C3", "G3"]


@pytest.mark.parametrize(
    "action, expected",
    [
        (Action(F, 3, 0), Action(F, 3, 1)),
        (Action(B, 3, 1), Action(B, 3, 0)),
        (Action(B, 3, 0), Action(B, 3, -1)),  # the caller
        (Action(R, 3, 1), Action(R, 3, 1)),
        (Action(W, 3, 1), Action(W, 3, 1)),
        (Action(P, 3, -1), Action(P, 3, 0)),
    ],
)
def test_successor(action: Action, expected: Action) -> None:
    assert successor(action) == expected


def test_caller_is_before_the_first_stage_and_after_the_last() -> None:
    n = 2

    assert Action(P, 3, -1) in predecessors(Action(F, 3, 0))
    assert list(predecessors(Action(L, 3, n))) == [Action(F, 3, n - 1)]
    assert Action(L, 3, n) in predecessors(Action(B, 3, n - 1))
    assert Action(B, 3, 0) in predecessors(Action(B, 3, -1))


def test_only_what_sends_gradients_home_waits_for_those_of_weights() -> None:
    assert [kind for kind in Kind if "W" in dict(kind.after)] == [Kind.GRADIENTS]
    assert list(predecessors(Action(W, 3, 1))) == [Action(B, 3, 1)]
