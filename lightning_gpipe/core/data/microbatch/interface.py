"""How a mini-batch becomes micro-batches, and their outputs one output again.

A pipeline needs several micro-batches to be busy, while the user has one mini-batch and wants one
output for it. For most batches the answer is the rows of their tensors (:class:`Rows`). Where the
cost of a row varies it may be worth to choose which rows go together and how much of them
(:class:`PaddedSequences`), and a user can do that in a way of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class MicroBatching(ABC):
    """A way to split a mini-batch and to merge the outputs of its micro-batches.

    Both methods are ordinary differentiable PyTorch and run in the caller's graph, outside of the
    pipeline: the gradient of the input is put together by autograd itself. Micro-batches may differ
    in shape from each other and from step to step.

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
        """Cut ``batch`` into micro-batches: at least one, and of any number.

        Args:
            batch: What the pipeline was called with.
            chunks: The number of micro-batches that the user wants.
        """

    @abstractmethod
    def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
        """Make one output of those of all micro-batches, given in order.

        Args:
            outputs: What the last layer returned for each micro-batch.
            batch: The mini-batch that was split.
        """
