"""Checkpoints that are whole whenever their process is killed.

Lightning writes a checkpoint into the folder for temporary files and moves it from there, which is
a copy where that is on another disk. A process that is killed meanwhile leaves a part of a file, in
the place of the last checkpoint. Here the copy is beside the file, whose place it takes at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints as Lightning does, and puts them in their place when they are whole."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if "://" in str(path):  # not on a disk
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = f"{path}.part"
        super().save_checkpoint(checkpoint, part, storage_options)
        os.replace(part, path)
