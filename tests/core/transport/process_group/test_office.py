"""What an office tells the others, over connections that the test plays."""

import json
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.wire.envelope import FRAME, open_message
from lightning_gpipe.core.transport.process_group.wire.message import MessageCode
from tests.support.waiting import PATIENCE


class Work:
    """A receive that ends with an error, once that may be."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, timeout: timedelta) -> None:
        self._ended.wait(timeout.total_seconds())
        raise RuntimeError("closed")


class Sent:
    def wait(self, timeout: timedelta) -> None:
        pass


class PlayedGroup:
    """A group of three processes, of which this one is the first, and the second is gone."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[tuple[int, Tensor]] = SimpleQueue()
        self.ended = threading.Event()
        self._gone = threading.Event()
        self._gone.set()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Sent:
        self.sent.put((rank, tensors[0]))
        return Sent()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return Work(self._gone if rank == 1 else self.ended)

    def told_of_loss(self) -> tuple[int, Any]:
        """Whom the office has told of a loss, and how."""
        while True:
            rank, message = self.sent.get(timeout=PATIENCE)
            frame = torch.empty(FRAME, dtype=torch.uint8)
            frame[: len(message)] = message
            header, content = open_message(frame, lambda room: None)
            if header.code == MessageCode.LOST:
                return rank, json.loads(bytes(content))


def test_who_noticed_a_loss_is_named_by_its_global_rank() -> None:
    """Once it was named by its rank in the pipeline, which differs in a second replica."""
    group: Any = PlayedGroup()
    office = Office(group, (4, 5, 6), timedelta(seconds=PATIENCE))
    office.listen()

    assert group.told_of_loss() == (2, [[1], "is lost: closed, as rank 4 noticed"])

    group.ended.set()
    office.close()
