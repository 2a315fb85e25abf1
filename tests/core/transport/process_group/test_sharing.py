"""One office for several pipelines: which one, where there are several."""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpipe.core.transport.process_group.ledger import Verdict
from lightning_gpipe.core.transport.process_group.sharing import Place, Shared

PLACE = Place(None, (0, 1), timedelta(seconds=1))


def shared(name: str, place: Place = PLACE) -> Shared:
    office: Any = SimpleNamespace(lost=None, leave=lambda: None)
    made = Shared(office, place, name)
    made.enter(["module"])
    return made


def test_latest_is_shared_whichever_earlier_ones_are_not_freed_yet() -> None:
    made = [shared(str(k)) for k in range(20)]
    place = PLACE._replace(ranks=(0, 2))
    elsewhere = shared("elsewhere", place)

    assert Shared.at(PLACE) is made[-1]
    assert Shared.at(place) is elsewhere


def test_one_that_nobody_uses_is_not_shared() -> None:
    first, second = shared("first"), shared("second")
    second.leave()

    assert Shared.at(PLACE) is first
    first.leave()
    assert Shared.at(PLACE) is None


def test_one_that_is_freed_while_processes_meet_is_not_ended() -> None:
    first = shared("first")

    held = Shared.held_at(PLACE)
    first.leave()  # as the garbage collector does

    assert held is not None
    assert held is first
    assert Shared.at(PLACE) is first
    held.leave()
    assert Shared.at(PLACE) is None


def test_one_that_ends_just_before_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shared("first"), shared("second")
    enter = Shared.enter

    def freed_before(self: Shared, pipelines: Sequence[str]) -> int:
        if self is second:
            vars(self.office)["lost"] = Verdict((0,), "has ended its pipeline")
        return enter(self, pipelines)

    monkeypatch.setattr(Shared, "enter", freed_before)

    assert Shared.held_at(PLACE) is first
    assert second._users == 1  # as before
    first.leave()
    assert Shared.held_at(PLACE) is first
    first.leave()
    first.leave()
    assert Shared.held_at(PLACE) is None
