"""The lines of the user's code that errors speak of, such as ``model.py:7``."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
import torch.utils.checkpoint

# Neither PyTorch's code nor this package's is the user's, nor is Python's own.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen")
_CHECKPOINT = torch.utils.checkpoint.__file__
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def current_line() -> str:
    """The line that runs now; the innermost one of the user's."""
    return _innermost(sys._getframe(1))


def calling_line(above: int = 0) -> str:
    """The line that calls a module.

    A class of modules may override ``__call__``, which says nothing of where it is called.

    Args:
        above: The number of functions around the caller that are not the user's for sure.
    """
    return _innermost(sys._getframe(1 + above), but="__call__")


def checkpointed_line() -> str:
    """The line that calls PyTorch's activation checkpointing, if what runs now is within."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return _innermost(frame)


def line_of(error: BaseException) -> str:
    """The innermost line of the user's from which an error came, with its code."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if is_users(each.filename)]
    if not users:
        return ""
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}"


@lru_cache(maxsize=1024)  # every call of a block asks, of the same few files
def is_users(filename: str) -> bool:
    """Whether a file is neither PyTorch's, nor this package's, nor Python's."""
    if filename.startswith(_LIBRARIES):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)


def _innermost(frame: FrameType | None, but: str = "") -> str:
    """The line of the innermost function of the user's, but those of a name."""
    while frame is not None:
        code = frame.f_code
        if code.co_name != but and is_users(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
