"""Objects that blocks fill, such as the caches of keys and values that generation needs.

Micro-batches would fill a cache over one another. Without gradients the mini-batch runs in one
micro-batch, which fills it as the plain model does. With gradients a cache is of no use: it is
filled, and nobody reads it. So the blocks get None instead, as in libraries that recompute layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from lightning_gpipe.core.frontends.module_list.rehearsal.effects import tensors_within
from lightning_gpipe.core.frontends.module_list.tape.arguments import Path, map_leaves
from lightning_gpipe.core.frontends.module_list.tape.calls import RecordedCall


class CacheRule:
    """Decides about caches among the arguments of blocks; gives each warning once.

    Args:
        spread: Whether other processes have blocks too, which fill objects of their own.
    """

    def __init__(self, *, spread: bool = False) -> None:
        self._spread = spread
        self._warned_without = False
        self._warned_one_by_one = False

    def without(self, call: RecordedCall, arguments: Any, paths: Collection[Path]) -> Any:
        """Return the arguments of a call with None for the objects at these paths, which it fills.

        Raises:
            RuntimeError: If one of them is not empty.
        """

        def emptied(path: Path, leaf: Any) -> Any:
            if path not in paths:
                return leaf
            if any(True for _ in tensors_within(leaf)):
                raise RuntimeError(
                    f"an object that blocks fill must be empty if gradients are recorded: got "
                    f"{call.titles([path])} of {call}, a {type(leaf).__name__} that holds tensors. "
                    "Micro-batches cannot fill it one after another: run without gradients, or do "
                    "not pass it."
                )
            return None

        without = map_leaves(emptied, arguments)
        if not self._warned_without:
            self._warned_without = True
            warnings.warn(
                f"{_named(call, paths)} is None while gradients are recorded: blocks fill it, and "
                "micro-batches would fill it over one another. To do without this warning, do not "
                "pass it: for a model of transformers write model.config.use_cache = False.",
                stacklevel=2,
            )
        return without

    def one_by_one(self, call: RecordedCall, paths: Collection[Path], rows: int) -> None:
        """Warn that a mini-batch runs in one micro-batch, which fills the objects at these paths.

        Raises:
            RuntimeError: If blocks of several processes would fill an object, each its own.
        """
        if self._spread:
            raise RuntimeError(
                "an object that blocks fill must be in one process with all of them: got "
                f"{_named(call, paths)}, and stages in several processes, each of which would "
                "fill only a part of its own object. Do not pass it: for a model of transformers "
                "write model.config.use_cache = False; generation then computes all positions "
                "again for each token. Or run all stages in one process."
            )
        if rows > 1 and not self._warned_one_by_one:
            self._warned_one_by_one = True
            warnings.warn(
                f"{_named(call, paths)} is filled by blocks, so that mini-batches run in one "
                "micro-batch, in which stages wait for one another. Generation needs that. "
                "Evaluation does not: for a model of transformers write use_cache=False there.",
                stacklevel=2,
            )


def _named(call: RecordedCall, paths: Collection[Path]) -> str:
    return f"{call.titles(sorted(paths, key=str))} of {call}"
