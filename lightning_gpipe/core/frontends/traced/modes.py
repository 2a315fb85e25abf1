"""Grad mode and autocast as a forward sets them around some of its calls.

``with torch.no_grad():`` in a forward leaves no trace in a graph. So each recorded call is compared
with the state in which the forward began, and runs under its own where that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

_DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """Grad mode, and what autocast does on each kind of device."""

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Modes:
        """The modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in _DEVICES
            ),
        )

    @contextmanager
    def within(self, outer: Modes) -> Iterator[None]:
        """Set what differs from ``outer``."""
        with ExitStack() as stack:
            if self.grad != outer.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, mine, other in zip(_DEVICES, self.autocast, outer.autocast, strict=True):
                if mine != other:
                    enabled, dtype = mine
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


class Under:
    """Runs a call under modes of its own.

    Args:
        run: What is called.
        modes: Its modes.
        outer: The modes in which the forward begins.
    """

    def __init__(self, run: Callable[..., Any], modes: Modes, outer: Modes) -> None:
        self._run, self._modes, self._outer = run, modes, outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._modes.within(self._outer):
            return self._run(*args, **kwargs)
