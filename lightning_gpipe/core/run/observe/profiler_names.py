"""The names of actions in PyTorch's profiler: ``stage 1 forward 3``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from lightning_gpipe.core.schedules import Action

_P = ParamSpec("_P")
_T = TypeVar("_T")


def profiled() -> bool:
    """Return whether a profiler of PyTorch runs, in any thread."""
    return torch.autograd.profiler._is_profiler_enabled


def named(action: Action, run: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap ``run`` under the name of an action in a profiler."""
    name = f"stage {action.j} {action.kind.verb} {action.i}"

    def run_named(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with record_function(name):
            return run(*args, **kwargs)

    return run_named
