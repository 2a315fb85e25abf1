"""Says why a file is no checkpoint.

What PyTorch raises depends on how far its unpickler came: ``EOFError: Ran out of input`` for an
empty file, ``KeyError: 101`` for a text. So a file that cannot be read is looked at again, as what
it should be: an archive, whose end lists its parts, each with a checksum.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

# With which what torch.save writes begins, and what it wrote before PyTorch 1.6.
_ARCHIVE = b"PK\x03\x04"
_OLD_ARCHIVE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = "pytorch-lightning_version"
_MOST = 4  # keys that are told


@contextmanager
def explained(path: str | Path, place: Path | None) -> Iterator[None]:
    """A ``with`` block that reads a checkpoint.

    Args:
        path: The checkpoint, as the user gave it.
        place: Where it is on this machine; None if it is elsewhere.

    Raises:
        RuntimeError: If it fails because of what is in the file.
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


def check_contents(found: Any, path: str | Path) -> None:
    """Refuse what was read if no Trainer has saved it."""
    if isinstance(found, Mapping) and _VERSION in found:
        return
    has = f"a {type(found).__name__}"
    if isinstance(found, Mapping):
        has += f" with {', '.join(map(repr, islice(found, _MOST))) or 'nothing'}"
        has += f" and {len(found) - _MOST} more" * (len(found) > _MOST)
    raise RuntimeError(
        f"the checkpoint {path} must be a file that a Trainer has saved, which has "
        f"{_VERSION!r}: got {has}. Weights alone are for model.load_state_dict(torch.load(...))."
    )


def _cause(place: Path, error: Exception) -> str | None:
    """What is wrong with a file; None if it is whole, and of PyTorch."""
    size = place.stat().st_size
    with place.open("rb") as file:
        start = file.read(len(_OLD_ARCHIVE))
    if not size:
        return "is empty"
    if start.startswith(_ARCHIVE):
        return _cause_in_archive(place, size)
    if start != _OLD_ARCHIVE:
        return f"is no file of PyTorch, for it begins with {start[:8]!r}"
    ended = isinstance(error, EOFError | RuntimeError) or "truncated" in str(error)
    return f"has lost its end: {size:,} bytes are left" if ended else None


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
