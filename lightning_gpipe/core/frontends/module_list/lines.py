"""The line of the user's code that is running."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[3]),
    contextlib.__file__,
    functools.__file__,
)


def user_line() -> str:
    """The innermost line outside of PyTorch and this package, such as ``model.py:7``."""
    frame = sys._getframe(1)
    # A class of blocks may override `__call__`, which says nothing of where it is called.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_LIBRARIES) or frame.f_code.co_name == "__call__"
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
