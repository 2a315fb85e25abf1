from typing import Any

import pytest
import torch

from lightning_gpipe import MicroBatching, PaddedSequences, Rows, whole
from lightning_gpipe.core.data import Division

X = torch.ones(5, 7, 2)


@pytest.mark.parametrize(
    "method, batch, sizes, widths",
    [
        (Rows(), X, (2, 2, 1), {7, 2}),
        (Rows(dim=1), X, (3, 2, 2), {5, 2}),
        (Rows(dim={"x": 1}), {"x": X, "mask": torch.ones(7, 5)}, (3, 2, 2), {5, 2}),
        (Rows(), {"x": X, "table": whole(torch.ones(9, 9)), "name": "x"}, (2, 2, 1), {7, 2}),
        (
            PaddedSequences("n", trim=["x"], pad_outputs=True),
            {"x": X, "n": torch.tensor([7, 1, 1, 1, 1])},
            (1, 4),
            {7, 2},
        ),
    ],
)
def test_rows_of_micro_batches(
    method: MicroBatching, batch: Any, sizes: tuple[int, ...], widths: set[int]
) -> None:
    division = method.division(method.split(batch, 3))

    assert division == Division(sizes, frozenset(widths))
