import pytest

from lightning_gpipe.core.plan.action import Action, Kind, successor

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD


def test_action_prints_its_letter_and_micro_batch() -> None:
    assert [str(Action(kind, 3, 1)) for kind in Kind] == ["F3", "R3", "B3"]


@pytest.mark.parametrize(
    "action, expected",
    [
        (Action(F, 3, 0), Action(F, 3, 1)),
        (Action(B, 3, 1), Action(B, 3, 0)),
        (Action(B, 3, 0), Action(B, 3, -1)),  # the caller
        (Action(R, 3, 1), Action(R, 3, 1)),
    ],
)
def test_successor(action: Action, expected: Action) -> None:
    assert successor(action) == expected
