"""A case: a small model of a library, what it is called with, and what of it is pipelined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROWS = 7  # in three micro-batches of 3, 2 and 2; no other size of a case is 7


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: What it is called in the table.
        build: Makes it, offline, with random weights.
        inputs: Makes the keyword arguments of its forward, of 7 rows.
        module: The path of what is pipelined: a ModuleList, or a module that is traced, such as
            the model itself, which is ""; several for several stacks.
        refused: What the pipeline says, as a regular expression, if it cannot take the model.
        dtype: What the model computes in. Convolutions with batch norms magnify rounding: they are
            compared in float64.
        mixes: Whether rows of a batch influence one another, as in batch norms. In training it is
            compared with the plain model on one micro-batch after the other.
        quick: Whether ``make test`` runs it.
        large: Whether a step takes seconds, so that it is run in a few settings only.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Mapping[str, Any]]
    module: str | tuple[str, ...] = ""
    refused: str | None = None
    dtype: torch.dtype = torch.float32
    mixes: bool = False
    quick: bool = False
    large: bool = False

    @property
    def by_micro_batch(self) -> bool:
        """Whether it can have a loss for each micro-batch.

        One module must be pipelined, and all inputs be tensors with the rows, or settings.
        """
        inputs = [x for x in self.inputs(torch.Generator()).values() if isinstance(x, Sized)]
        with_rows = all(isinstance(x, torch.Tensor) and len(x) == ROWS for x in inputs)
        return isinstance(self.module, str) and with_rows
