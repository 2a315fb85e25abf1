"""Measured balances, saved in checkpoints.

Two measurements of time are never equal, and the random numbers that layers draw depend on their
stage. So a resumed run takes the balance of the interrupted one, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_gpipe.checkpoints.portable import value_of_entry, with_entry
from lightning_gpipe.core.pipeline import PipedModule

FROM_CHECKPOINT = "checkpoint"
_SAVED = ("time", "memory", FROM_CHECKPOINT)


class MeasuredBalances:
    """The sizes of the stages of each pipelined module, as measured or read from a checkpoint."""

    def __init__(self) -> None:
        self._sizes: dict[str, list[int]] = {}  # by the path of the module

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        self._sizes = dict(value_of_entry(checkpoint, "balance") or {})

    def save(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return with_entry(checkpoint, balance=dict(self._sizes)) if self._sizes else checkpoint

    def keep(
        self,
        modules: Sequence[PipedModule],
        balances: Sequence[Any],
        sizes: Sequence[Sequence[int]],
    ) -> None:
        """Keep the stage sizes of those modules whose ``balance`` is measured or was saved."""
        self._sizes = {
            piped.path: list(size)
            for piped, balance, size in zip(modules, balances, sizes, strict=True)
            if isinstance(balance, str) and balance in _SAVED
        }

    def replace(self, modules: Sequence[PipedModule], sizes: Sequence[Sequence[int]]) -> None:
        """Replace the sizes of those modules that have been kept."""
        pairs = zip(modules, sizes, strict=True)
        self._sizes |= {x.path: list(size) for x, size in pairs if x.path in self._sizes}

    def balance_of(self, piped: PipedModule, balance: Any, devices: int) -> Any:
        """Return the sizes from the checkpoint if ``balance`` is to be measured and they fit.

        Otherwise return ``balance``, or raise a ValueError if it must be in the checkpoint.
        """
        if not isinstance(balance, str) or balance not in _SAVED:
            return balance
        sizes, units = self._sizes.get(piped.path, []), len(piped.frontend.units)
        if sizes and sum(sizes) == units and len(sizes) % devices == 0:
            rank_zero_info(f"GPipe takes the balance of {piped.name} from the checkpoint: {sizes}")
            return sizes
        if balance != FROM_CHECKPOINT:
            return balance
        found = f"{sizes} for {sum(sizes)} units" if sizes else "none"
        raise ValueError(
            "balance='checkpoint' takes the balance that a checkpoint has, which must fit: got "
            f"{found}, for the {units} units of {piped.name} and {devices} devices. Resume with "
            "ckpt_path=, from a run with balance='time' or 'memory', or write balance='time'."
        )
