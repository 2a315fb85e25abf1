"""One office for several pipelines: which one, where there are several."""

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpipe.core.transport.process_group.connecting.shared_connections import (
    Peers,
    SharedOffice,
)
from lightning_gpipe.core.transport.process_group.ledger import Failure, Ledger

PEERS = Peers(None, (0, 1), timedelta(seconds=1))


def shared(name: str, peers: Peers = PEERS) -> SharedOffice:
    office: Any = SimpleNamespace(ledger=Ledger(), leave=lambda: None)
    made = SharedOffice(office, peers, name)
    made.enter(["module"])
    return made


def test_latest_is_shared_whichever_earlier_ones_are_not_freed_yet() -> None:
    made = [shared(str(k)) for k in range(20)]
    others = PEERS._replace(ranks=(0, 2))
    elsewhere = shared("elsewhere", others)

    assert SharedOffice.latest(PEERS) is made[-1]
    assert SharedOffice.latest(others) is elsewhere


def test_one_that_nobody_uses_is_not_shared() -> None:
    first, second = shared("first"), shared("second")
    second.leave()

    assert SharedOffice.latest(PEERS) is first
    first.leave()
    assert SharedOffice.latest(PEERS) is None


def test_one_that_is_freed_while_processes_meet_is_not_ended() -> None:
    first = shared("first")

    held = SharedOffice.enter_latest(PEERS)
    first.leave()  # as the garbage collector does

    assert held is not None
    assert held is first
    assert SharedOffice.latest(PEERS) is first
    held.leave()
    assert SharedOffice.latest(PEERS) is None


def test_one_that_ends_just_before_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shared("first"), shared("second")
    enter = SharedOffice.enter

    def freed_before(self: SharedOffice, pipelines: Sequence[str]) -> int:
        if self is second:
            self.office.ledger.lose([], Failure((0,), "has ended its pipeline"))
        return enter(self, pipelines)

    monkeypatch.setattr(SharedOffice, "enter", freed_before)

    assert SharedOffice.enter_latest(PEERS) is first
    assert second._users == 1  # as before
    first.leave()
    assert SharedOffice.enter_latest(PEERS) is first
    first.leave()
    first.leave()
    assert SharedOffice.enter_latest(PEERS) is None


def test_loss_is_known_to_all_offices_of_the_process() -> None:
    known: list[tuple[str, list[int]]] = []
    worlds: list[Any] = [SimpleNamespace(), SimpleNamespace()]
    made = []
    for name, world in zip(("pipeline", "all", "another"), (*worlds[:1], *worlds), strict=True):
        made.append(shared(name, PEERS._replace(world=world)))
        office: Any = made[-1].office
        office.hear_of_loss = lambda ranks, how, name=name: known.append((name, ranks))

    assert made[0].office.on_lost is not None
    made[0].office.on_lost([1], "is lost")

    assert known == [("pipeline", [1]), ("all", [1])]
