"""The lines of the user's code that errors name, such as ``model.py:7``."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
import torch.utils.checkpoint
from torch.autograd import Function

# Neither PyTorch's code nor this package's is the user's, nor is Python's own.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen")
_CHECKPOINT = torch.utils.checkpoint.__file__
_APPLY = Function.apply.__code__
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def current_line() -> str:
    """Return the user's innermost line that runs now."""
    return _innermost(sys._getframe(1))


def calling_line(above: int = 0) -> str:
    """Return the line that calls a module, outside of any ``__call__`` of the module's class.

    ``above`` counts the functions around the caller that are certainly not the user's.
    """
    return _innermost(sys._getframe(1 + above), but="__call__")


def checkpointed_line() -> str:
    """Return the line that calls PyTorch's activation checkpointing; empty outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT:
        frame = frame.f_back
    return _innermost(frame)


def autograd_function() -> str:
    """Return the call of the autograd function whose forward runs now; empty outside of one.

    PyTorch's activation checkpointing is none.
    """
    frame = _frame_of_apply()
    if frame is None or frame.f_locals["cls"] is torch.utils.checkpoint.CheckpointFunction:
        return ""
    return f"{frame.f_locals['cls'].__name__}.apply() at {_innermost(frame)}"


def in_autograd_function() -> bool:
    """Return True in the forward of an autograd function; reentrant checkpoints are some."""
    return _frame_of_apply() is not None


def _frame_of_apply() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame


def line_of(error: BaseException) -> str:
    """Return the user's innermost line that raised an error, with its code."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users(frame.filename)]
    if not users:
        return ""
    return f"{users[-1].filename}:{users[-1].lineno}: {users[-1].line}"


@lru_cache(maxsize=1024)  # every call of a block asks, of the same few files
def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not PyTorch's, this package's or Python's."""
    if filename.startswith(_LIBRARIES):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)


def _innermost(frame: FrameType | None, but: str = "") -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_name != but and is_users(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
