"""All workers in turns on the calling thread."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from typing_extensions import override

from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from lightning_gpipe.core.transport import InlineTransport, LocalTransport
from tests.support.faults import OwnError
from tests.support.placements import one_each
from tests.support.transports import Job, layout_of

CPU = torch.device("cpu")
PHASE = fill_drain(2, one_each(2)).phase(0)


class Noted(Job):
    """A task that notes what happens to it."""

    def __init__(self, name: str, place: list[str]) -> None:
        super().__init__(lambda: None)
        self._name, self._place = name, place

    @override
    def session(self, *, joined: bool = False) -> AbstractContextManager[None]:
        return self._session("joins" if joined else "begins")

    @contextmanager
    def _session(self, verb: str) -> Iterator[None]:
        self._place.append(f"{self._name} {verb}")
        yield
        self._place.append(f"{self._name} ends")

    @override
    def perform(self, actions: Sequence[Action], *, at_once: bool = False) -> None:
        self._place.append(" ".join(map(str, actions)))


def test_sessions_last_as_long_as_all_actions() -> None:
    transport, place = InlineTransport(layout_of(2, [CPU, CPU])), list[str]()

    transport.run(transport.open(PHASE), [Noted("one", place), Noted("other", place)])

    assert place[:2] == ["one begins", "other joins"]
    assert place[-2:] == ["other ends", "one ends"]
    assert len(place) > 4


@pytest.mark.parametrize("fails", [False, True])
def test_operators_use_a_workers_share_of_the_cores(fails: bool) -> None:
    """So that results are those of threads to the bit: some depend on how a sum is divided."""
    inline = LocalTransport(layout_of(2, [CPU, CPU])).inline()
    found: list[int] = []

    def work() -> None:
        found.append(torch.get_num_threads())
        if fails:
            raise OwnError

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(OwnError) if fails else nullcontext():
            inline.run(inline.open(PHASE), [Job(work), Job(work)])
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)

    assert set(found) == {2}
    assert after == 4


def test_value_that_no_action_has_sent() -> None:
    transport = InlineTransport(layout_of(2, [CPU, CPU]))

    with pytest.raises(RuntimeError, match="it ended without"):
        transport.open(PHASE).receive(Action(Kind.FORWARD, 0, 2))


def test_run_by_threads_within_a_run_on_the_calling_thread() -> None:
    threads = LocalTransport(layout_of(2, [CPU, CPU]))
    inline = threads.inline()

    def run_within() -> None:
        threads.run(threads.open(PHASE), [Job(lambda: None)] * 2)

    with pytest.raises(RuntimeError, match="must not run the pipeline that it is part of"):
        inline.run(inline.open(PHASE), [Job(run_within), Job(lambda: None)])
    threads.close()
