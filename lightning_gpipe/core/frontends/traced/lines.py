"""The lines of the user's code that tracing speaks of."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch
import torch.utils.checkpoint

# Neither PyTorch's code nor this package's is the user's, nor is Python's own.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))
_CHECKPOINT = torch.utils.checkpoint.__file__
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Refused(TypeError):
    """A forward that cannot be traced: what must hold, the user's line, and what to do."""


def current_line() -> str:
    """The line that runs now, as ``file.py:7``; the innermost one of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def checkpointed_line() -> str:
    """The line that calls PyTorch's activation checkpointing, if what runs now is within."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """The innermost line of the user's from which an error came, with its code."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if is_users(each.filename)]
    if not users:
        return ""
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}"


def is_users(filename: str) -> bool:
    """Whether a file is neither PyTorch's, nor this package's, nor Python's."""
    if filename.startswith((*_LIBRARIES, "<frozen")):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)
