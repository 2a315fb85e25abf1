"""Notices layers that draw from Python's ``random`` or ``numpy.random``.

To compare their states takes longer than a small layer, so it is done in mini-batches 1, 2, 4, 8
and so on of each training mode. See :mod:`~lightning_gpipe.core.faithful.library_generators` for
what is done about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_gpipe.core.faithful import (
    LibraryGenerators,
    LibraryState,
    Manager,
    TrainingFlags,
)

_CAPACITY = 64  # training modes
_BITS = {"random": 8, "numpy.random": 16}  # others than those of SharedGenerators
_INSTEAD = "Use torch.rand, or a generator that the layer holds, such as numpy.random.default_rng()"


@dataclass
class LibraryWatch:
    """Watches the generators during one forward.

    Attributes:
        saved: The generators, if their states must be saved for recomputation.
        before: Their states, if they will be compared.
        settle: What to do after forward with the names of those that were drawn from.
        heard: The bits that other processes have signalled.
    """

    saved: LibraryGenerators | None
    before: LibraryState | None
    settle: Callable[[list[str]], None]
    heard: int = 0
    _drawn: frozenset[str] = frozenset()  # from what, before the caller's code last ran

    @property
    def bits(self) -> int:
        """What other processes must hear: which generators layers have drawn from."""
        moved = self._moved()
        return sum(bit for name, bit in _BITS.items() if name in moved)

    def end(self) -> None:
        """Compare the states after forward.

        Raises:
            RuntimeError: If a recomputation would draw other numbers, or other processes have not
                drawn them.
        """
        if self.before is None:
            return
        moved = self._moved()
        if found := [name for name, bit in _BITS.items() if name in moved or self.heard & bit]:
            self.settle(found)

    def callers(self) -> list[Manager]:
        """The context manager in which the caller's code runs meanwhile, which may draw."""
        return [] if self.before is None else [_Callers(self)]

    def pause(self) -> None:
        """Note what layers have drawn from: what follows is the caller's, until it is resumed."""
        self._drawn = frozenset(self._moved())

    def resume(self) -> None:
        """Go on from the states that the caller's code has left."""
        self.before = LibraryGenerators().get_state()

    def _moved(self) -> list[str]:
        if self.before is None:
            return []
        now = LibraryGenerators().moved(self.before)
        return [name for name in _BITS if name in self._drawn or name in now]


class _Callers:
    """Counts what is drawn in a ``with`` block as drawn by the caller's code, not by layers."""

    # A class: see Note [Context managers are classes].

    def __init__(self, watch: LibraryWatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.pause()

    def __exit__(self, *error: object) -> None:
        self._watch.resume()


class LibraryDraws:
    """Records whether the layers of a pipeline draw from the generators of libraries."""

    def __init__(self) -> None:
        self._generators = LibraryGenerators()
        self._count: dict[TrainingFlags, int] = {}
        self._drawing: set[TrainingFlags] = set()
        self._told = False

    def saved(self, flags: TrainingFlags) -> bool:
        """Whether the states must be saved before each forward of the mini-batch that has begun."""
        return self._count.get(flags, 0) <= 1 or flags in self._drawing

    def begin(
        self, flags: TrainingFlags, *, alone: bool, recomputed: bool, spread: bool = False
    ) -> LibraryWatch:
        """Begin the forward of a mini-batch.

        Args:
            flags: The training flags of all modules.
            alone: Whether all stages run on the calling thread.
            recomputed: Whether any micro-batch will be recomputed.
            spread: Whether other processes have stages too.
        """
        if len(self._count) > _CAPACITY:
            self._count.clear()
        count = self._count[flags] = self._count.get(flags, 0) + 1
        looked_at = count & (count - 1) == 0  # a power of two
        before = self._generators.get_state() if looked_at else None
        settle = partial(self._settle, flags, alone=alone, recomputed=recomputed)
        return LibraryWatch(
            saved=self._generators if alone and recomputed and self.saved(flags) else None,
            before=before,
            settle=partial(_refuse, before) if spread and before is not None else settle,
        )

    def _settle(
        self, flags: TrainingFlags, moved: list[str], *, alone: bool, recomputed: bool
    ) -> None:
        """Refuse what was drawn from these, or warn of it, if it cannot be drawn again."""
        reproducible = alone and (self.saved(flags) or not recomputed)
        self._drawing.add(flags)
        if reproducible:
            return
        found = f"{' and '.join(moved)} drew random numbers"
        if not recomputed:
            self._warn(
                f"layers must draw from PyTorch's generators to be reproducible: {found} while the "
                f"stages ran on several threads, in any order. {_INSTEAD}, or threads=False."
            )
        elif alone:
            raise RuntimeError(
                "layers that are recomputed must draw random numbers in their first mini-batch or "
                f"in none: {found} for the first time after mini-batches in which they did not, "
                f"and a recomputation would draw others. {_INSTEAD}."
            )
        else:
            raise RuntimeError(
                "layers that are recomputed must draw from PyTorch's generators: "
                f"{found} while the stages ran on several threads, and a recomputation would draw "
                f"others. {_INSTEAD}, or threads=False, or activation_checkpointing='never'."
            )

    def _warn(self, message: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(message, stacklevel=2)


def _refuse(before: LibraryState, moved: list[str]) -> None:
    """Undo and refuse what was drawn from these, because other processes have not drawn it."""
    LibraryGenerators().set_state(before)
    raise RuntimeError(
        "layers in a pipeline over processes must draw from PyTorch's generators: "
        f"{' and '.join(moved)} drew random numbers in one process and not in the others, where "
        f"your own code would draw other numbers afterwards. {_INSTEAD}."
    )
