"""Values that a group exchanges arrive as they were sent, whatever the form of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.transport import RankFailed
from lightning_gpipe.distributed.group import Group
from tests.support.processes import assert_equal, said
from tests.support.ranks import Pool, Ranks

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def sent(values: list[Any]) -> Any:
    """What a rank gets that another one sends."""
    group = Group(timedelta(seconds=20))
    return group.broadcast(values if group.rank == 0 else None)


def is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_sparse


def test_tensors_of_any_form(two_ranks: Pool) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    values: list[Any] = [
        base.transpose(0, 2),
        base[:, ::2],
        base[0, 0].expand(3, 4),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        base.to_sparse(),
        {"twice": (base, base)},
        None,
    ]

    (found,) = two_ranks.run(sent, values)[1:]

    assert_equal([x for x in found if not is_sparse(x)], [x for x in values if not is_sparse(x)])
    assert torch.equal(found[7].to_dense(), base)
    assert found[8]["twice"][0] is found[8]["twice"][1]
    assert found[0].stride() == values[0].stride()


class Knows:
    """A watcher that knows a failure already."""

    def __init__(self, failure: RankFailed) -> None:
        self.known = failure

    def failure(self, within: float) -> RankFailed:
        return self.known

    def on_lost_wait(self, act: Callable[[], None]) -> None:
        """Do nothing: nobody is lost."""


def apart(ended: bool) -> str:
    """What a rank says that waits for something else than the other one, and the second knows."""
    group = Group(timedelta(seconds=20))
    failure = RankFailed("rank 0 is known for something")
    failure.ended = ended
    if group.rank == 1:
        group.watchers = [Knows(failure)]

    def wait() -> None:
        with group.waiting_for(f"the word of rank {group.rank}"):
            pass

    return said(wait)


@pytest.mark.parametrize("ended", [True, False])
def test_process_that_ends_is_not_why_others_are_out_of_step(two_ranks: Pool, ended: bool) -> None:
    """It took part, found the same, and was gone before the other one looked for a failure."""
    first, second = two_ranks.run(apart, ended)

    assert first.startswith("OutOfStep | all processes must do the same")
    assert second.startswith("OutOfStep | " if ended else "RankFailed | rank 0 is known")


def handed(value: Any) -> Any:
    """What a rank takes, or what a tensor is that was moved to the second one."""
    group = Group(timedelta(seconds=20))
    if group.rank == 0:
        group.hand(value, [0, 2], "a value")
    if group.rank == 2:
        return group.take("a value")
    tensor = torch.full((3,), float(group.rank), dtype=torch.float64)
    group.move(tensor, 0, 1, "a tensor")
    return tensor.tolist()


def test_values_for_some_processes(three_ranks: Ranks) -> None:
    value = {"x": torch.arange(6.0).reshape(2, 3), "name": "rows"}

    *moved, taken = three_ranks.run(handed, value)

    assert moved == [[0.0] * 3] * 2
    assert_equal(taken, value)
