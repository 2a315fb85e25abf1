"""Bodies as bytes, and which of them the other process remembers.

Most are the same in every step. So a body is sent when it differs from the one before, in the same
slot; the receiver remembers that one.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from lightning_gpipe.core.data import LEAF_SPEC
from lightning_gpipe.core.plan import Action, Route
from lightning_gpipe.core.transport.process_group.message import Body

_CAPACITY = 4096  # bodies that are remembered; beyond it, the least recently used is sent again


class Sent:
    """The bodies that were sent to one process, by the slots in which it remembers them.

    Args:
        capacity: How many are remembered.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[tuple[Action, Route | None], tuple[int, bytes]] = OrderedDict()

    def slot_for(self, body: Body, encoded: bytes) -> tuple[int, bool]:
        """The slot of a body, and whether it must be sent because another one is there."""
        key = body.to, body.route
        before = self._slots.get(key)
        if before is not None:
            slot = before[0]
        elif len(self._slots) < self._capacity:
            slot = len(self._slots)
        else:
            _, (slot, _) = self._slots.popitem(last=False)
        self._slots[key] = slot, encoded
        self._slots.move_to_end(key)
        return slot, before is None or before[1] != encoded


class Received:
    """The bodies that came from one process, by their slots.

    Args:
        coder: Decodes them.
    """

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._slots: dict[int, Body | bytes] = {}

    def body(self, slot: int, encoded: bytes) -> Body:
        """The body in a slot.

        Args:
            slot: The slot.
            encoded: What came for it; nothing if it is the one that was there before.
        """
        found = encoded or self._slots[slot]
        body = self._coder.decoded(found) if isinstance(found, bytes) else found
        if encoded:
            # What a layer may change in place must be made again for the next one.
            self._slots[slot] = body if body.lasting else encoded
        return body


class Coder:
    """Encodes bodies; those of all processes must be made with equal arguments.

    Args:
        routes: The skip connections. Their names differ between processes, so they are numbered.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        self._numbers = {route: number for number, route in enumerate(routes)}

    def encoded(self, body: Body) -> bytes:
        """The body as bytes.

        Raises:
            TypeError: If something in it cannot be pickled.
        """
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._numbers).dump(tuple(body))
        except Exception as error:
            raise TypeError(
                "what travels between processes must be tensors and values that can be pickled: "
                f"{type(error).__name__}: {error}. Make it where it is needed instead, or run the "
                "stages between which it travels in one process."
            ) from error
        return buffer.getvalue()

    def decoded(self, encoded: bytes) -> Body:
        """The body."""
        return Body(*_Unpickler(io.BytesIO(encoded), self._routes).load())


class _Pickler(pickle.Pickler):
    """Names what must be the same object, or differs, in the other process."""

    def __init__(self, buffer: io.BytesIO, numbers: dict[Route, int]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, value: Any) -> Any:
        if value is LEAF_SPEC:
            return -1
        return self._numbers.get(value) if type(value) is Route else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, routes: list[Route]) -> None:
        super().__init__(buffer)
        self._routes = routes

    def persistent_load(self, number: Any) -> Any:
        return LEAF_SPEC if number < 0 else self._routes[number]
