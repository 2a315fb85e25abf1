"""Bodies as bytes, and the slots in which the receiver remembers them."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

from lightning_gpipe.core.data import LEAF_SPEC
from lightning_gpipe.core.schedules import Action
from lightning_gpipe.core.transport.process_group.wire.message import Body, RouteId

_LEAF = "leaf"
_CAPACITY = 4096  # slots; beyond it, the least recently used one is used again


class _SentBody(NamedTuple):
    """The latest body of a slot."""

    slot: int
    content: bytes  # the body as bytes
    body: Body | None  # None if another one cannot be compared with it


class SentBodies:
    """The bodies that were sent to one process, by the slots in which it remembers them."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[tuple[int, Action, RouteId], _SentBody] = OrderedDict()

    def slot_for(self, body: Body, pipeline: int = 0) -> tuple[int, bytes]:
        """Return the slot of a body, and the bytes to send: none if the receiver has it."""
        key = pipeline, body.to, body.route
        before = self._slots.get(key)
        if before is not None and before.body is not None and body.is_alike(before.body):
            self._slots.move_to_end(key)
            return before.slot, b""
        content = _encode(body)
        if before is not None:
            slot = before.slot
        elif len(self._slots) < self._capacity:
            slot = len(self._slots)
        else:
            slot = self._slots.popitem(last=False)[1].slot
        self._slots[key] = _SentBody(slot, content, body if body.is_alike(body) else None)
        self._slots.move_to_end(key)
        changed = before is None or before.content != content
        return slot, content if changed else b""


class ReceivedBodies:
    """The bodies that came from one process, by their slots."""

    def __init__(self) -> None:
        self._slots: dict[int, Body | bytes] = {}

    def body(self, slot: int, encoded: bytes) -> Body:
        """Return the body in a slot; ``encoded`` is empty if it is the same as before."""
        latest = encoded or self._slots[slot]
        body = _decode(latest) if isinstance(latest, bytes) else latest
        if encoded:
            # A layer may change mutable values in place, so each receiver gets new ones.
            self._slots[slot] = body if body.immutable else encoded
        return body


def _encode(body: Body) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(tuple(body))
    except Exception as error:
        raise TypeError(
            "values sent between processes must be tensors and values that can be pickled: got "
            f"{type(error).__name__}: {error}. Make the value on the stage that needs it, or run "
            "both stages in one process."
        ) from error
    return buffer.getvalue()


def _decode(content: bytes) -> Body:
    return Body(*_Unpickler(io.BytesIO(content)).load())


class _Pickler(pickle.Pickler):
    """Replaces the object that must be the same one in the other process by a name."""

    def persistent_id(self, value: Any) -> Any:
        return _LEAF if value is LEAF_SPEC else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        assert name == _LEAF
        return LEAF_SPEC
