"""Checkpoints that are whole whenever their process is killed.

Lightning makes the file in memory, writes it into the folder for temporary files, and moves it from
there, which is a copy where that is on another disk. A process that is killed meanwhile, or whose
disk is full, leaves a part of a file in the place of the last checkpoint.

Here PyTorch writes into a file beside the last checkpoint, whose place it takes at once, when it is
on the disk. No more memory is needed. What such a file is made of, and files that are not on this
machine, are as Lightning has them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_gpipe.unreadable import explained

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # some file systems of networks


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints as Lightning does, and puts them in their place when they are whole."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """As Lightning's.

        Raises:
            OSError: If the file cannot be written; what was in its place is whole.
            TypeError: If there are ``storage_options``, which are for a CheckpointIO of the user's.
        """
        if storage_options is not None:  # refused under the name that a plain Trainer gives it
            TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        place = on_this_machine(path)
        if place is None:
            super().save_checkpoint(checkpoint, path)
            return
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _in_the_place_of(place) as file:
                _write(checkpoint, file)
        except OSError as error:
            kept = "The one that was there is whole. " if os.path.exists(place) else ""
            raise OSError(
                error.errno,
                f"the checkpoint {place} was not saved: {error.strerror or error}. {kept}Its "
                "folder must let this process write, and have room for one more checkpoint",
            ) from error

    @override
    def load_checkpoint(self, path: str | Path, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # what else there is differs between versions
        """As Lightning's.

        Raises:
            RuntimeError: If the file cannot be read; it says why.
        """
        with explained(path, on_this_machine(path)):
            return super().load_checkpoint(path, **options)


def on_this_machine(path: str | Path) -> Path | None:
    """Where a path leads to, as Lightning reads it; None if that is no file system of a machine."""
    system, place = url_to_fs(str(path))
    return Path(place) if isinstance(system, LocalFileSystem) else None


@contextmanager
def _in_the_place_of(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces another at the end of a ``with`` block; if that fails, it is removed.

    Each has a name of its own, so that two processes never write into one file.
    """
    for left in path.parent.glob(f"{escape(path.name)}.*.part"):  # by one that was killed
        left.unlink(missing_ok=True)
    part = path.with_name(f"{path.name}.{token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            _sync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _write(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:  # after the first error PyTorch could not end its archive either
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _sync_folder(folder: Path) -> None:
    """Let the disk have the names in a folder."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
