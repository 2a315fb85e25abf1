"""A balance that was measured, kept in checkpoints.

Times are never measured twice the same, and what layers draw depends on the stages that they are
in. So a run that is resumed has the balance that it had, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_gpipe.core.pipeline import Taken
from lightning_gpipe.own_entry import own_of, with_own

MEASURED = ("time", "memory")
FROM_CHECKPOINT = "checkpoint"


class KeptBalance:
    """The balance of a run that was measured, or that a checkpoint has."""

    def __init__(self) -> None:
        self._kept: dict[str, list[int]] = {}  # of each module, by its path

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what a checkpoint has."""
        self._kept = dict(own_of(checkpoint, "balance") or {})

    def save(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint, with the balance if there is one."""
        return with_own(checkpoint, balance=dict(self._kept)) if self._kept else checkpoint

    def keep(
        self, found: Sequence[Taken], balances: Sequence[Any], sizes: Sequence[Sequence[int]]
    ) -> None:
        """Keep what was measured, or taken from a checkpoint.

        Args:
            found: What runs as pipelines.
            balances: The balance of each, as the user gave it.
            sizes: The number of units in each stage, of each.
        """
        self._kept = {
            taken.path: list(size)
            for taken, balance, size in zip(found, balances, sizes, strict=True)
            if _is_kept(balance)
        }

    def replace(self, found: Sequence[Taken], sizes: Sequence[Sequence[int]]) -> None:
        """Keep other balances in the place of those that are kept."""
        pairs = zip(found, sizes, strict=True)
        self._kept |= {taken.path: list(size) for taken, size in pairs if taken.path in self._kept}

    def given(self, found: Sequence[Taken], balances: Sequence[Any], devices: int) -> list[Any]:
        """The balances, those to be measured replaced by what the checkpoint has.

        Raises:
            ValueError: If one must be in the checkpoint, and is not.
        """
        pairs = zip(found, balances, strict=True)
        return [self._of(taken, balance, devices) for taken, balance in pairs]

    def _of(self, taken: Taken, balance: Any, devices: int) -> Any:
        if not _is_kept(balance):
            return balance
        kept, units = self._kept.get(taken.path, []), len(taken.units)
        if kept and sum(kept) == units and len(kept) % devices == 0:
            rank_zero_info(f"GPipe takes the balance of {taken.name} from the checkpoint: {kept}")
            return kept
        if balance != FROM_CHECKPOINT:
            return balance
        found = f"{kept} for {sum(kept)} units" if kept else "none"
        raise ValueError(
            "balance='checkpoint' takes the balance that a checkpoint has, which must fit: got "
            f"{found}, for the {units} units of {taken.name} and {devices} devices. Resume with "
            "ckpt_path=, from a run with balance='time' or 'memory', or write balance='time'."
        )


def _is_kept(balance: Any) -> bool:
    return isinstance(balance, str) and balance in (*MEASURED, FROM_CHECKPOINT)
