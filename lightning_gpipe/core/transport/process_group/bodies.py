"""Bodies as bytes, and which of them the other process remembers.

Most are the same in every step. So a body is sent when it differs from the one before, in the same
slot; the receiver remembers that one.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

from lightning_gpipe.core.data import LEAF_SPEC
from lightning_gpipe.core.plan import Action
from lightning_gpipe.core.transport.process_group.message import Body, Way

_LEAF = "leaf"
_CAPACITY = 4096  # bodies that are remembered; beyond it, the least recently used is sent again


class _Before(NamedTuple):
    """The body that was sent last in a slot.

    Attributes:
        slot: The slot.
        content: As bytes.
        body: As it was, if another one can be compared with it.
    """

    slot: int
    content: bytes
    body: Body | None


class Sent:
    """The bodies that were sent to one process, by the slots in which it remembers them.

    Args:
        capacity: How many are remembered.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[tuple[int, Action, Way], _Before] = OrderedDict()

    def slot_for(self, body: Body, pipeline: int = 0) -> tuple[int, bytes]:
        """The slot of a body, and what to send for it: nothing if it is there already.

        Args:
            body: The body.
            pipeline: Which pipeline it is of.

        Raises:
            TypeError: If something in it cannot be pickled.
        """
        key = pipeline, body.to, body.way
        before = self._slots.get(key)
        if before is not None and before.body is not None and body.is_alike(before.body):
            self._slots.move_to_end(key)
            return before.slot, b""
        content = encoded(body)
        if before is not None:
            slot = before.slot
        elif len(self._slots) < self._capacity:
            slot = len(self._slots)
        else:
            slot = self._slots.popitem(last=False)[1].slot
        self._slots[key] = _Before(slot, content, body if body.is_alike(body) else None)
        self._slots.move_to_end(key)
        changed = before is None or before.content != content
        return slot, content if changed else b""


class Received:
    """The bodies that came from one process, by their slots."""

    def __init__(self) -> None:
        self._slots: dict[int, Body | bytes] = {}

    def body(self, slot: int, encoded: bytes) -> Body:
        """The body in a slot.

        Args:
            slot: The slot.
            encoded: What came for it; nothing if it is the one that was there before.
        """
        found = encoded or self._slots[slot]
        body = decoded(found) if isinstance(found, bytes) else found
        if encoded:
            # What a layer may change in place must be made again for the next one.
            self._slots[slot] = body if body.lasting else encoded
        return body


def encoded(body: Body) -> bytes:
    """The body as bytes.

    Raises:
        TypeError: If something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(tuple(body))
    except Exception as error:
        raise TypeError(
            "what travels between processes must be tensors and values that can be pickled: "
            f"{type(error).__name__}: {error}. Make it where it is needed instead, or run the "
            "stages between which it travels in one process."
        ) from error
    return buffer.getvalue()


def decoded(content: bytes) -> Body:
    """The body."""
    return Body(*_Unpickler(io.BytesIO(content)).load())


class _Pickler(pickle.Pickler):
    """Names what must be the same object in the other process."""

    def persistent_id(self, value: Any) -> Any:
        return _LEAF if value is LEAF_SPEC else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        assert name == _LEAF
        return LEAF_SPEC
