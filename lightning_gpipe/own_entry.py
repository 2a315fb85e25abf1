"""The one entry of a checkpoint that is ours: a Trainer without a pipeline leaves it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "lightning_gpipe"


def with_own(checkpoint: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The checkpoint with these values in our entry, beside those that are there."""
    return {**checkpoint, _KEY: {**checkpoint.get(_KEY, {}), **values}}


def own_of(checkpoint: Mapping[str, Any], name: str) -> Any:
    """The value of this name in our entry; None if there is none."""
    return checkpoint.get(_KEY, {}).get(name)
