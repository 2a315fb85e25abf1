"""Writes checkpoint files atomically, and refuses a file that is no checkpoint.

Lightning writes the file to the folder for temporary files and moves it from there, which is a copy
if that folder is on another disk. A process that is killed meanwhile, or a full disk, leaves an
incomplete file in the place of the last checkpoint. Here PyTorch writes to a file beside it, which
replaces it once it is synchronised to the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_gpipe.core.faithful import add_note

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # some network file systems
_VERSION = "pytorch-lightning_version"
_KEYS = 4  # the most that an error lists


class AtomicFiles(TorchCheckpointIO):
    """A CheckpointIO that writes checkpoint files atomically."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint.

        Raises:
            OSError: If the file cannot be written; the previous one is unchanged.
            TypeError: If there are ``storage_options``, which need a CheckpointIO of the user's.
        """
        place = None if storage_options is not None else on_this_machine(path)
        if place is None:  # as a plain Trainer, which has an error for storage options
            TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _in_the_place_of(place) as file:
                _write(checkpoint, file)
        except OSError as error:
            previous = "The one that was there is whole. " if os.path.exists(place) else ""
            raise OSError(
                error.errno,
                f"the checkpoint {place} was not saved: {error.strerror or error}. {previous}Its "
                "folder must let this process write, and have room for one more checkpoint",
            ) from error

    @override
    def load_checkpoint(self, path: str | Path, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # what else there is differs between versions
        try:
            return super().load_checkpoint(path, **options)
        except Exception as error:
            add_note(
                error,
                f"raised while the checkpoint {path} was read, which must be a whole file that a "
                "Trainer has saved. If it is empty or truncated, take an older one, or save it "
                "again.",
            )
            raise


def on_this_machine(path: str | Path) -> Path | None:
    """Return the local path, read as Lightning reads it; None for a remote file system."""
    system, place = url_to_fs(str(path))
    return Path(place) if isinstance(system, LocalFileSystem) else None


@contextmanager
def _in_the_place_of(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` at the end of a ``with`` block, or is removed on an error.

    Its name is random, so that two processes never write to one file.
    """
    for leftover in path.parent.glob(f"{escape(path.name)}.*.part"):  # of a killed process
        leftover.unlink(missing_ok=True)
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
    except RuntimeError as error:  # PyTorch could not end its archive, after an error of the disk
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _sync_folder(folder: Path) -> None:
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


def check_contents(checkpoint: Any, path: str | Path) -> None:
    """Raise if the contents of a file were not saved by a Trainer."""
    if isinstance(checkpoint, Mapping) and _VERSION in checkpoint:
        return
    kind = f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        kind += f" with {', '.join(map(repr, islice(checkpoint, _KEYS))) or 'nothing'}"
        kind += f" and {len(checkpoint) - _KEYS} more" * (len(checkpoint) > _KEYS)
    raise RuntimeError(
        f"the checkpoint {path} must be a file that a Trainer has saved, which has "
        f"{_VERSION!r}: got {kind}. Weights alone are for model.load_state_dict(torch.load(...))."
    )
