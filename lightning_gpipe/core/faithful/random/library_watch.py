"""Detects layers that draw from Python's ``random`` or ``numpy.random``.

To compare their states takes longer than a small layer, so they are compared in mini-batches 1, 2,
4, 8 and so on of each training mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.random.random_state import LIBRARIES, RandomState
from lightning_gpipe.core.faithful.state.behavior import record

_BITS = {"random": 8, "numpy.random": 16}  # others than those of SharedGenerators
_INSTEAD = "Use torch.rand, or a generator that the layer holds, such as numpy.random.default_rng()"


@dataclass
class LibraryWatch:
    """Watches Python's and NumPy's generators during one forward.

    As a context manager it ignores what is drawn in a ``with`` block, by the caller's code.
    """

    saved: bool  # whether the states must be saved for recomputation
    before: RandomState | None  # the states before forward, if they will be compared
    settle: Callable[[list[str]], None]  # called with the names of the generators drawn from
    heard: int = 0  # the bits that other processes have signalled
    _earlier: frozenset[str] = frozenset()  # drawn from before the caller's code last ran

    @property
    def bits(self) -> int:
        """The generators that layers have drawn from, as a signal to other processes."""
        moved = self._moved()
        return sum(bit for name, bit in _BITS.items() if name in moved)

    def end(self) -> None:
        if self.before is None:
            return
        moved = self._moved()
        if names := [name for name, bit in _BITS.items() if name in moved or self.heard & bit]:
            self.settle(names)

    def callers(self) -> list[Manager]:
        """Return the context managers for the caller's code, which may draw meanwhile."""
        return [] if self.before is None else [self]

    def __enter__(self) -> None:
        self._earlier = frozenset(self._moved())

    def __exit__(self, *error: object) -> None:
        self.before = RandomState.of(LIBRARIES)

    def _moved(self) -> list[str]:
        if self.before is None:
            return []
        now = self.before.differences()
        return [name for name in _BITS if name in self._earlier or name in now]


class LibraryDraws:
    """Records whether the layers of a pipeline draw from Python's and NumPy's generators."""

    def __init__(self) -> None:
        self._count: dict[bytes, int] = {}
        self._drawing: set[bytes] = set()
        self._warned = False

    def saved(self, flags: bytes) -> bool:
        return self._count.get(flags, 0) <= 1 or flags in self._drawing

    def begin(
        self, flags: bytes, *, alone: bool, recomputed: bool, spread: bool = False
    ) -> LibraryWatch:
        count = self._count.get(flags, 0) + 1
        record(self._count, flags, count)
        power_of_two = count & (count - 1) == 0
        before = RandomState.of(LIBRARIES) if power_of_two else None
        settle = partial(self._settle, flags, alone=alone, recomputed=recomputed)
        if spread and before is not None:
            settle = partial(_refuse, before)
        return LibraryWatch(alone and recomputed and self.saved(flags), before, settle)

    def _settle(self, flags: bytes, moved: list[str], *, alone: bool, recomputed: bool) -> None:
        saved = self.saved(flags)
        self._drawing.add(flags)
        if alone and (saved or not recomputed):
            return
        draws = f"{' and '.join(moved)} drew random numbers"
        if not recomputed:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"layers must draw from PyTorch's generators to be reproducible: {draws} while "
                    f"the stages ran on several threads, in any order. {_INSTEAD}, or "
                    "threads=False.",
                    stacklevel=1,
                )
        elif alone:
            raise RuntimeError(
                "layers that are recomputed must draw random numbers in their first mini-batch or "
                f"in none: {draws} for the first time after mini-batches in which they did not, "
                f"and a recomputation would draw others. {_INSTEAD}."
            )
        else:
            raise RuntimeError(
                "layers that are recomputed must draw from PyTorch's generators: "
                f"{draws} while the stages ran on several threads, and a recomputation would draw "
                f"others. {_INSTEAD}, or threads=False, or activation_checkpointing='never'."
            )


def _refuse(before: RandomState, moved: list[str]) -> None:
    """Restore the generators and raise, because other processes have not drawn from them."""
    before.restore()
    raise RuntimeError(
        "layers in a pipeline over processes must draw from PyTorch's generators: "
        f"{' and '.join(moved)} drew random numbers in one process and not in the others, where "
        f"your own code would draw other numbers afterwards. {_INSTEAD}."
    )
