"""Notices layers that draw from Python's ``random`` or ``numpy.random``.

To compare their states takes longer than a small layer, so it is done in mini-batches 1, 2, 4, 8
and so on of each training mode. See :mod:`~lightning_gpipe.core.faithful.library_generators` for
what is done about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_gpipe.core.faithful import LibraryGenerators, TrainingFlags

_CAPACITY = 64  # training modes
_INSTEAD = "Use torch.rand, or a generator that the layer holds, such as numpy.random.default_rng()"


class LibraryDraws:
    """Records whether the layers of a pipeline draw from the generators of libraries."""

    def __init__(self) -> None:
        self._generators = LibraryGenerators()
        self._count: dict[TrainingFlags, int] = {}
        self._drawing: set[TrainingFlags] = set()
        self._told = False

    def saved(self, flags: TrainingFlags) -> bool:
        """Whether the states must be saved before each forward of the mini-batch that begins."""
        return self._count.get(flags, 0) <= 1 or flags in self._drawing

    @contextmanager
    def forward(
        self, flags: TrainingFlags, *, alone: bool, recomputed: bool
    ) -> Iterator[LibraryGenerators | None]:
        """The forward of a mini-batch in a ``with`` block: the states after it are compared.

        Args:
            flags: The training flags of all modules.
            alone: Whether all stages run on the calling thread.
            recomputed: Whether any micro-batch will be recomputed.

        Yields:
            The generators, if their states must be saved for recomputation.

        Raises:
            RuntimeError: If a recomputation would draw other numbers.
        """
        if len(self._count) > _CAPACITY:
            self._count.clear()
        count = self._count[flags] = self._count.get(flags, 0) + 1
        looked_at = count & (count - 1) == 0  # a power of two
        before = self._generators.get_state() if looked_at else None
        yield self._generators if alone and recomputed and self.saved(flags) else None
        moved = [] if before is None else self._generators.moved(before)
        if moved:
            self._settle(flags, moved, alone=alone, recomputed=recomputed)

    def _settle(
        self, flags: TrainingFlags, moved: list[str], *, alone: bool, recomputed: bool
    ) -> None:
        """Refuse what was drawn, or warn of it, unless a recomputation draws the same."""
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
