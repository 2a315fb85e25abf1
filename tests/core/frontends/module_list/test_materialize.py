"""What blocks return, and what of it the caller gets."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.transport.threads import frames_of_threads
from tests.support.interpreter import Interpreter
from tests.support.loops import WIDTH, Around, looped, states
from tests.support.models import assert_same
from tests.support.waiting import PATIENCE


def test_call_that_another_thread_looks_at() -> None:
    """Its frame kept what it had, so that this left the pipeline in one process of several."""

    def look() -> None:
        with frames_of_threads():
            begun.set()
            time.sleep(0.2)

    def more(k: int, x: Tensor) -> Tensor:
        twice = x * 2
        if k == 3 and looking.ident is None:  # at the last block, in the first forward
            looking.start()
            begun.wait(PATIENCE)
        return twice + 1

    begun = threading.Event()
    looking = threading.Thread(target=look)
    model, run = Around(between=more), Interpreter()
    with looped(model, run=run):
        model(states())
        looking.join()
        model(states())

    watched, unwatched = run.programs
    assert watched.outputs == unwatched.outputs


class Pair(NamedTuple):
    x: Tensor
    weights: Tensor | None


@dataclass
class Record:
    x: Tensor
    weights: Tensor
    name: str = "a"


class Returning(nn.Linear):
    """Returns its result in some structure."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.made(super().forward(x))

    def made(self, y: Tensor) -> Any:
        return y


class Tuples(Returning):
    def made(self, y: Tensor) -> Any:
        return (y, (y.mean(-1), None, "name", 3))


class Named(Returning):
    def made(self, y: Tensor) -> Any:
        return Pair(y, y.softmax(-1))


class Records(Returning):
    def made(self, y: Tensor) -> Any:
        return Record(y, y.softmax(-1))


class Dicts(Returning):
    def made(self, y: Tensor) -> Any:
        return {0: y, "weights": [y.softmax(-1)]}


class Shared(Returning):
    """Returns a table for all rows, and several entries per row."""

    def made(self, y: Tensor) -> Any:
        return y, self.weight[None] * 2, y.flatten(0, 1)


def first(x: Any) -> Any:
    return x.x if isinstance(x, Record) else x[0]


class Collecting(Around):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        results = []
        for block in self.blocks:
            results.append(block(x))
            x = first(results[-1])
        return results


@pytest.mark.parametrize("kind", [Tuples, Named, Records, Dicts, Shared])
@pytest.mark.parametrize("rows", [7, 2, 1])
def test_structures_of_results(kind: type[Returning], rows: int):
    plain = Collecting(block=kind)
    model = copy.deepcopy(plain)
    with looped(model, stages=3):
        for _ in range(2):
            found, wanted = model(states(rows)), plain(states(rows))
            assert [type(each) for each in found] == [type(each) for each in wanted]
            assert_same(found, wanted)


def test_values_that_nobody_wants_are_not_returned():
    run = Interpreter()
    model = Around(lambda k, x: x[0] if k else x, block=Tuples)
    with looped(model, run=run):
        model(states())
    (program,) = run.programs
    assert len(program.outputs) == 4  # of the last block, and what it was called with


def test_number_that_a_block_returns_for_its_rows():
    class Losses(Returning):
        def made(self, y: Tensor) -> Any:
            return y, y.square().mean()

    model = Collecting(block=Losses)
    with looped(model), pytest.raises(RuntimeError, match=r"0-dim tensor of blocks.0\[1\]"):
        model(states())
    with looped(model, run=Interpreter(1)):
        assert model(states())[0][1].dim() == 0


def test_result_that_is_the_input():
    model = Around(block=nn.Identity)
    with looped(model):
        x = states()
        y = model(x)
        assert y is not x
        torch.testing.assert_close(y, x)
    assert type(x) is Tensor


def test_results_can_be_edited_and_copied():
    model = Collecting(block=Tuples)
    with looped(model):
        results = model(states())
    x = results[1][0]
    expected = x.detach() + 1
    x += 1
    torch.testing.assert_close(copy.deepcopy(x.detach()), expected)
    assert type(x) is Tensor and x.requires_grad
