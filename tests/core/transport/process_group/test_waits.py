"""Waits of the user's code that are ended on a thread of its own."""

import threading

from lightning_gpipe.core.transport.process_group.waits import OtherWaits
from tests.support.waiting import PATIENCE


class Held:
    """Ends its waits when it may, and closes what ends them."""

    def __init__(self, waits: OtherWaits) -> None:
        self.may, self.ended = threading.Event(), False
        self._waits = waits

    def end(self) -> None:
        self.may.wait(PATIENCE)
        self._waits.join()  # as the last reference to a pipeline may be that of this thread
        self.ended = True


def test_thread_that_ends_waits_is_joined() -> None:
    waits = OtherWaits()
    held = Held(waits)
    waits.add(held.end)

    waits.end()
    threading.Timer(0.1, held.may.set).start()
    waits.join()

    assert held.ended


def test_thread_that_never_began_is_not_joined() -> None:
    OtherWaits().join()
