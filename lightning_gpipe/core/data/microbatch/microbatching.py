"""The interface for splitting mini-batches and merging outputs, which users can implement.

:class:`Rows` splits by rows; :class:`PaddedSequences` joins rows of similar length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple


class Division(NamedTuple):
    """The sizes of the dim in which a mini-batch was split, and those of its other dims.

    A layer that mixes a dim of one of the first sizes probably mixes rows.
    """

    sizes: tuple[int, ...]  # the number of rows of each micro-batch
    widths: frozenset[int]  # the sizes of the other dims of tensors with rows


class MicroBatching(ABC):
    """A way to split a mini-batch and to merge the outputs of its micro-batches.

    Both methods are ordinary differentiable PyTorch and run in the caller's graph, outside of the
    pipeline, so autograd computes the gradient of the mini-batch from those of the micro-batches.
    Micro-batches may differ in shape from each other and from step to step.

    Example::

        class Interleaved(MicroBatching):
            def split(self, batch, chunks):
                return [batch[i::chunks] for i in range(min(chunks, len(batch)))]

            def merge(self, outputs, batch):
                merged = outputs[0].new_empty(len(batch), *outputs[0].shape[1:])
                for i, output in enumerate(outputs):
                    merged[i :: len(outputs)] = output
                return merged
    """

    @abstractmethod
    def split(self, batch: Any, chunks: int) -> Sequence[Any]:
        """Split ``batch``, the input of the pipeline, into micro-batches.

        Args:
            batch: The mini-batch.
            chunks: The number of micro-batches that the user asked for; there may be another
                number, but at least one.
        """

    @abstractmethod
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Merge the outputs of all micro-batches into one.

        Args:
            outputs: The output of the last layer for each micro-batch, in order.
            batch: The mini-batch that was split.
        """

    def merge_results(self, results: Sequence[Any], batch: Any) -> Any:
        """Merge the tensors or lists that a training step has returned for the micro-batches.

        Each has an entry per row. By default :meth:`merge` does it.
        """
        return self.merge(results, batch)

    def division(self, microbatches: Sequence[Any]) -> Division | None:
        """Return the numbers of rows of the result of :meth:`split`, or None if unknown.

        They serve to find layers that mix rows, and to weight means.
        """
        return None


def check_chunks(chunks: int) -> None:
    """Raise unless ``chunks`` is a number of micro-batches."""
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an integer, the number of micro-batches: got {chunks!r}.")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, the number of micro-batches: got {chunks}.")


def check_microbatching(microbatching: MicroBatching | None) -> None:
    """Raise unless ``microbatching`` is a MicroBatching or None."""
    if microbatching is not None and not isinstance(microbatching, MicroBatching):
        raise TypeError(
            "microbatching must be an instance of a subclass of lightning_gpipe.MicroBatching, or "
            f"None: got {microbatching!r}."
        )
