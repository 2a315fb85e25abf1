"""Which mini-batches are watched for layers that mix rows."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from torch import nn

from lightning_gpipe.core.data import Division
from lightning_gpipe.core.faithful.layers.batch_dimension import RowWatches

SEQUENCES = Division((2, 2), frozenset({5}))


@pytest.fixture
def watches() -> RowWatches:
    return RowWatches([(nn.Softmax(dim=0), "layer 0 (Softmax)")])


def watched(watches: RowWatches, signature: Hashable, division: Division = SEQUENCES) -> bool:
    watch = watches.begin(signature, lambda: division)
    if watch is not None:
        watch.close()
    return watch is not None


def test_first_mini_batch_of_each_call_signature(watches: RowWatches) -> None:
    assert watched(watches, "a")
    assert not watched(watches, "a")
    assert watched(watches, "b")


def test_mini_batch_that_did_not_end_is_watched_again(watches: RowWatches) -> None:
    watches.begin("a", lambda: SEQUENCES)
    assert watched(watches, "a")


def test_one_micro_batch_has_all_rows(watches: RowWatches) -> None:
    assert not watched(watches, "a", Division((4,), frozenset()))
    assert watched(watches, "a")


def test_many_call_signatures_do_not_add_up(watches: RowWatches) -> None:
    assert watched(watches, "a")
    assert all(watched(watches, k) for k in range(100))
    assert watched(watches, "a"), "forgotten among so many others, and so watched again"
