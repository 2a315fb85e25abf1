"""The one entry that a pipeline adds to a checkpoint; a Trainer without a pipeline ignores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "lightning_gpipe"


def with_entry(checkpoint: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return the checkpoint with these values added to the entry."""
    return {**checkpoint, _KEY: {**checkpoint.get(_KEY, {}), **values}}


def value_of_entry(checkpoint: Mapping[str, Any], name: str) -> Any:
    """Return a value of the entry; None if there is none."""
    return checkpoint.get(_KEY, {}).get(name)
