"""Waits that are ended, whoever of the others is left, and on a thread of its own."""

import os
from contextlib import suppress
from threading import Event, Thread, Timer

import torch
import torch.distributed as dist

from lightning_gpipe.core.transport import abort_group
from lightning_gpipe.core.transport.process_group.abort import UserCollectives
from tests.support.ranks import Failed, group_of, new_ranks
from tests.support.waiting import PATIENCE


def wait_in_vain() -> str:
    """What a rank is told that waits for one that says nothing, when another one has ended."""
    rank, group = dist.get_rank(), group_of(3)
    if rank == 2:
        os._exit(0)
    if rank == 0:
        dist.recv(torch.empty(1), group_src=1, group=group)  # that the other has been told
        return "told"
    with suppress(RuntimeError):  # until it has closed its connection
        dist.recv(torch.empty(1), group_src=2, group=group)
    ends = Thread(target=abort_group, args=(group,))
    try:
        waiting = dist.irecv(torch.empty(1), group_src=0, group=group)
        assert waiting is not None, "the ranks are of the group"
        ends.start()
        waiting.wait()
    except RuntimeError:
        return "ended"
    finally:
        ends.join()
    return "waited"


def test_wait_for_one_that_says_nothing_after_another_one_has_ended() -> None:
    """Once only the connection to the next rank was tried; if it was closed, nothing changed."""
    with new_ranks(3) as ranks:
        first, second, third = ranks.outcomes(wait_in_vain)

    assert second == "ended"
    assert isinstance(first, Failed)
    assert isinstance(third, Failed)


class Abort:
    """Ends its waits when it may, and closes what ends them."""

    def __init__(self, collectives: UserCollectives) -> None:
        self.may, self.ended = Event(), False
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
    Timer(0.1, held.may.set).start()
    collectives.join()

    assert held.ended


def test_thread_that_never_began_is_not_joined() -> None:
    UserCollectives().join()
