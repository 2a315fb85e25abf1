"""What a run of W&B that is offline wrote to the disk, to be sent to the service later.

The file is a log in blocks of 32 KiB, as LevelDB writes one: each part of a record has seven bytes
before it, a checksum, its length and whether it is the last.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4
_MODEL = re.compile(r"graph_\d+")  # the number of a watched model in the process


def records(root: Path) -> Iterator[Record]:
    """The records of the only run in a folder."""
    (path,) = root.glob("wandb/offline-run-*/*.wandb")
    data, at, parts = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += _HEADER
        parts += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(parts)
            parts = b""


def history(root: Path) -> list[dict[str, Any]]:
    """What was logged, without the times."""
    return [
        {name: value for name, value in _values(each.history.item).items() if name[0] != "_"}
        for each in records(root)
        if each.HasField("history")
    ]


def config(root: Path) -> dict[str, Any]:
    """The hyperparameters."""
    found: dict[str, Any] = {}
    for each in records(root):
        if each.HasField("config"):
            found |= _values(each.config.update)
    return found


def _values(items: Any) -> dict[str, Any]:
    """The values of fields, by name; nested names are joined by a slash."""
    pairs = ((each.key or "/".join(each.nested_key), each.value_json) for each in items)
    return dict(sorted((_MODEL.sub("", name), json.loads(value)) for name, value in pairs))
