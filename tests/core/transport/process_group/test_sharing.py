"""One office for several pipelines: which one, where there are several."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

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
