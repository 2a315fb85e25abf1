"""Copies of the tree, in which modules are changed; the working tree itself never is."""

from __future__ import annotations

import shutil
from importlib.util import cache_from_source
from pathlib import Path

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")


class Tree:
    """A copy of the tree in another folder.

    Args:
        original: The root of what is copied.
        root: The folder of the copy, which must not exist.
    """

    def __init__(self, original: Path, root: Path) -> None:
        self.root = root
        self._sources: dict[str, str] = {}  # of modules that were changed, as they were copied
        shutil.copytree(original, root, ignore=_LEFT_OUT)

    def source(self, module: str) -> str:
        """The source of a module as it was copied: the original may have changed since."""
        return self._sources.get(module) or (self.root / module).read_text(encoding="utf-8")

    def change(self, module: str, source: str) -> None:
        """Give a module another source."""
        self._sources.setdefault(module, self.source(module))
        path = self.root / module
        path.write_text(source, encoding="utf-8")
        # Python takes the bytecode of before if size and second of the change are the same.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def restore(self, module: str) -> None:
        """Give a module its own source."""
        self.change(module, self.source(module))
