"""Gradients of one leaf, from several micro-batches and stages, become one."""

from __future__ import annotations

import torch

from lightning_gpipe.core.run.backward.sums import sum_gradients


def leaf() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


def test_each_leaf_has_the_sum_of_its_own():
    a, b, c = leaf(), leaf(), leaf()
    pairs = [(b, torch.tensor([1.0, 2.0])), (a, torch.ones(2)), (b, torch.tensor([3.0, 4.0]))]

    sum_a, sum_b, sum_c = sum_gradients(pairs, [a, b, c])

    assert sum_a is not None and sum_a.tolist() == [1.0, 1.0]
    assert sum_b is not None and sum_b.tolist() == [4.0, 6.0]
    assert sum_c is None


def test_sparse_and_dense_gradients_of_one_leaf_have_a_dense_sum():
    a = leaf()
    sparse = torch.tensor([0.0, 5.0]).to_sparse()

    (total,) = sum_gradients([(a, sparse), (a, torch.ones(2))], [a])

    assert total is not None and not total.is_sparse
    assert total.tolist() == [1.0, 6.0]


def test_leaf_that_only_a_recomputation_used_accumulates_its_gradient():
    a, late = leaf(), leaf()
    pairs = [(late, torch.ones(2)), (a, torch.ones(2)), (late, torch.ones(2))]

    assert len(sum_gradients(pairs, [a])) == 1
    assert a.grad is None
    assert late.grad is not None and late.grad.tolist() == [2.0, 2.0]
