"""Explains why a file cannot be read as a checkpoint.

PyTorch's error depends on how far its unpickler came: ``EOFError: Ran out of input`` for an empty
file, ``KeyError: 101`` for a text. So an unreadable file is examined as the archive that it should
be: the list of members at its end, and the checksum of each.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

# The first bytes of a file that torch.save writes, and wrote before PyTorch 1.6.
_ARCHIVE = b"PK\x03\x04"
_OLD_ARCHIVE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = "pytorch-lightning_version"
_KEYS = 4  # the most that an error lists


@contextmanager
def explained(path: str | Path, place: Path | None) -> Iterator[None]:
    """Raise a RuntimeError if a ``with`` block cannot read the contents of a checkpoint.

    Args:
        path: The checkpoint, as the user gave it.
        place: Its local path; None if it is on another machine.
    """
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError):
        raise
    except Exception as error:
        cause = None if place is None else _cause(place, error)
        if cause is None:
            raise
        raise RuntimeError(
            f"the checkpoint {path} must be a whole file that a Trainer has saved: it {cause}. "
            "Take an older one, or save it again."
        ) from error


def check_contents(checkpoint: Any, path: str | Path) -> None:
    """Raise if the contents of a file were not saved by a Trainer."""
    if isinstance(checkpoint, Mapping) and _VERSION in checkpoint:
        return
    found = f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        found += f" with {', '.join(map(repr, islice(checkpoint, _KEYS))) or 'nothing'}"
        found += f" and {len(checkpoint) - _KEYS} more" * (len(checkpoint) > _KEYS)
    raise RuntimeError(
        f"the checkpoint {path} must be a file that a Trainer has saved, which has "
        f"{_VERSION!r}: got {found}. Weights alone are for model.load_state_dict(torch.load(...))."
    )


def _cause(place: Path, error: Exception) -> str | None:
    """The fault of a file, as a predicate; None if it is a whole file of PyTorch."""
    size = place.stat().st_size
    with place.open("rb") as file:
        start = file.read(len(_OLD_ARCHIVE))
    if not size:
        return "is empty"
    if start.startswith(_ARCHIVE):
        return _cause_in_archive(place, size)
    if start != _OLD_ARCHIVE:
        return f"is no file of PyTorch, for it begins with {start[:8]!r}"
    truncated = isinstance(error, EOFError | RuntimeError) or "truncated" in str(error)
    return f"has lost its end: {size:,} bytes are left" if truncated else None


def _cause_in_archive(place: Path, size: int) -> str | None:
    try:
        with zipfile.ZipFile(place) as archive:
            damaged = archive.testzip()
            names = archive.namelist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return f"has lost its end, or has other contents than were written: {size:,} bytes are left"
    if not any(name.endswith("/data.pkl") for name in names):
        return "is an archive of something else than PyTorch"
    return None if damaged is None else f"has other contents in {damaged!r} than were written"
