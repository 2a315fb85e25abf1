"""Waits of the user's code that are ended on a thread of its own."""

import threading

from lightning_gpipe.core.transport.process_group.user_collectives import UserCollectives
from tests.support.waiting import PATIENCE


class Abort:
    """Ends its waits when it may, and closes what ends them."""

    def __init__(self, collectives: UserCollectives) -> None:
        self.may, self.ended = threading.Event(), False
        self._collectives = collectives

    def abort(self) -> None:
        self.may.wait(PATIENCE)
        self._collectives.join()  # as the last reference to a pipeline may be that of this thread
        self.ended = True


def test_thread_that_ends_waits_is_joined() -> None:
    collectives = UserCollectives()
    held = Abort(collectives)
    collectives.add(held.abort)

    collectives.abort()
    threading.Timer(0.1, held.may.set).start()
    collectives.join()

    assert held.ended


def test_thread_that_never_began_is_not_joined() -> None:
    UserCollectives().join()
