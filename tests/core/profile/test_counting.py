"""Bytes that autograd saves are counted once, and not those that are in memory anyway."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_gpipe.core.profile.counting import SavedBytes, bytes_beside

ROW = 4 * 8  # bytes of a tensor


def row() -> Tensor:
    return torch.ones(4, dtype=torch.float64, requires_grad=True)


def test_saved_tensor_is_counted_once() -> None:
    saved = SavedBytes()

    with saved.counting():
        y = row().sin()  # which saves its input
        z = y * y  # which saves its input twice

    assert saved.number == 2 * ROW
    assert z.grad_fn is not None


def test_output_that_the_next_layer_saves_too_is_counted_with_the_first() -> None:
    saved = SavedBytes()
    with saved.counting():
        y = row().exp()  # which saves its output

    assert saved.are_counted([y, row()]) == [True, False]
    with saved.counting():
        z = y.sin()

    assert saved.number == 0
    assert z.grad_fn is not None


def test_parameters_are_not_counted() -> None:
    saved, layer, x = SavedBytes(), nn.Linear(4, 4).double(), row()

    with saved.counting():
        saved.ignore(layer.parameters())
        y = layer(x)

    assert saved.number == ROW, "the input"
    assert y.grad_fn is not None


def test_leaf_that_a_later_layer_saves_first() -> None:
    saved, x = SavedBytes(), row()
    before = saved.are_counted([x, x, 3])

    with saved.counting():
        y = x.sin()

    assert saved.since(before, [x, x, 3]) == [ROW, 0, 0]
    saved.keep([y])
    assert saved.are_counted([x]) == [False]
    saved.count([x, 3], [True, False])
    assert saved.are_counted([x]) == [True]


def test_bytes_beside_others() -> None:
    x, y = row(), row()

    assert bytes_beside([x, x[:2], y], [y.view(2, 2)]) == ROW
