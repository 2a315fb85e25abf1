"""Attributes of the user's objects that are replaced while there is a pipeline."""

from __future__ import annotations

from typing import Any


class ReplacedAttributes:
    """Replaces attributes of objects, and lets those of their classes show again."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, Any]] = []

    def set(self, owner: object, name: str, value: Any) -> None:
        """Replace an attribute of ``owner``."""
        vars(owner)[name] = value
        self._replaced.append((owner, name, value))

    def restore(self) -> None:
        """Remove the values, unless the user's code has replaced them in its turn."""
        for owner, name, value in self._replaced:
            if vars(owner).get(name) is value:
                del vars(owner)[name]
        self._replaced = []
