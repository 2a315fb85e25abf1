"""No hang: a step with a loss for each micro-batch fails in its code or in a layer.

The part that fails, the micro-batch and the kind of failure are drawn together: 30 faults in the
suite, 500 in a soak. After each, the next step computes what the plain modules do.

Here are also the tests of ``caller_task``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe.core.pipeline import GPipe
from tests.support.faults import Fuse, OwnError, throw
from tests.support.models import assert_same, gradients, rows
from tests.support.pipes import Pipe, with_and_without_threads

SORTS: dict[str, Callable[[], BaseException]] = {
    "error": OwnError,
    "Ctrl-C": KeyboardInterrupt,
    "exit": SystemExit,
}
PLACES = ["before", "after", "loss's backward", "first backward", "layer", "layer's backward"]
NOTES = {
    "before": "training_step before its call",
    "after": "training_step after its call",
    "loss's backward": "training_step after its call",
    "first backward": "backward of what training_step does before",
    "layer": "forward of micro-batch",
    "layer's backward": "backward of micro-batch",
}


class Steps:
    """Training steps with a fuse in each place.

    Attributes:
        fuses: By place.
        begun, ended: The micro-batches whose code was begun, and whose ``finally`` block ran.
    """

    def __init__(self, n: int, m: int, *, threads: bool) -> None:
        torch.manual_seed(1)
        self.fuses = {place: Fuse() for place in PLACES}
        burning = self.fuses["layer"], self.fuses["layer's backward"]
        layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(n)]
        layers[n // 2].extend(burning)
        self.plain = nn.Sequential(*layers).double()
        self.around = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
        self.pipeline = GPipe(
            self.plain, [1] * n, devices=["cpu"] * n, chunks=m, threads=threads,
            activation_checkpointing="never",
        )  # fmt: skip
        self.begun, self.ended = 0, 0

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.begun += 1
        try:
            x, y = batch
            self.fuses["before"].called("forward")
            x = self.around[0](self.fuses["first backward"](x.requires_grad_()))
            h = self.pipeline(x)
            self.fuses["after"].called("forward")
            return F.cross_entropy(self.around[1](self.fuses["loss's backward"](h)), y)
        finally:
            self.ended += 1

    def run(self, batch: tuple[Tensor, Tensor]) -> None:
        outcome = self.pipeline.by_micro_batch(self.step, batch, around=self.around)
        assert outcome.loss is not None
        outcome.loss.backward()

    def check_next(self, batch: tuple[Tensor, Tensor]) -> None:
        """A step of the pipeline, and one of the plain modules, give the same gradients."""
        modules = nn.ModuleList([self.plain, self.around])
        copied = deepcopy(modules)
        plain, around = copied[0], copied[1]
        assert isinstance(around, nn.Sequential)
        modules.zero_grad()
        copied.zero_grad()
        self.run(batch)
        F.cross_entropy(around[1](plain(around[0](batch[0]))), batch[1]).backward()
        assert_same(gradients(modules), gradients(copied))


def batch_of(count: int) -> tuple[Tensor, Tensor]:
    return rows(count), torch.arange(count) % 2


@pytest.mark.usefixtures("one_intra_op_thread")
@settings(max_examples=500 if settings().max_examples > 1000 else 30)
@given(
    sort=st.sampled_from(sorted(SORTS)),
    place=st.sampled_from(PLACES),
    n=st.integers(1, 4),
    m=st.integers(1, 6),
    threads=st.booleans(),
    data=st.data(),
)
def test_drawn_faults(
    sort: str, place: str, n: int, m: int, threads: bool, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, m - 1))
    steps = Steps(n, m, threads=threads)
    error = SORTS[sort]()
    kind = "backward" if "backward" in place else "forward"
    steps.fuses[place].light((kind, i), throw(error))

    with pytest.raises(type(error)) as caught:
        steps.run(batch_of(7))

    assert caught.value is error
    assert NOTES[place] in "".join(getattr(error, "__notes__", []))
    assert steps.ended == steps.begun
    assert not any(p.grad is not None for p in [*steps.plain.parameters()])
    steps.check_next(batch_of(5))
    steps.pipeline.close()


@pytest.fixture
def model(pipe: Pipe) -> GPipe:
    return pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), mode="never")


def check_mean(model: GPipe) -> None:
    """A step is as it must be."""
    loss = model.by_micro_batch(lambda x: model(x).mean(), rows(7)).loss
    assert loss is not None
    assert_same(loss.detach(), model(rows(7)).mean().detach())


Step = Callable[[GPipe, Tensor], Any]


def twice(model: GPipe, x: Tensor) -> Tensor:
    return (model(x) + model(x)).sum()


def under_autocast(model: GPipe, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return model(x).sum()


def without_gradients(model: GPipe, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).sum()


def none_for_one(model: GPipe, x: Tensor) -> Tensor | None:
    loss = model(x).sum()
    return loss if len(x) == 3 else None


def no_loss(model: GPipe, x: Tensor) -> str:
    model(x)
    return "loss"


def without_call(model: GPipe, x: Tensor) -> Tensor:
    return x.sum()


def without_call_once(model: GPipe, x: Tensor) -> Tensor | None:
    return model(x).sum() if len(x) == 3 else None


def without_call_at_first(model: GPipe, x: Tensor) -> Tensor | None:
    return None if len(x) == 3 else model(x).sum()


def several_elements(model: GPipe, x: Tensor) -> Tensor:
    return model(x)


def weight_of_some(model: GPipe, x: Tensor) -> dict[str, Any]:
    loss = {"loss": model(x).mean()}
    return loss | ({"loss_weight": 3} if len(x) == 3 else {})


def no_weight_at_all(model: GPipe, x: Tensor) -> dict[str, Any]:
    return {"loss": model(x).mean(), "loss_weight": 0}


REFUSED: dict[str, tuple[Step, str]] = {
    "a second call": (twice, "must call the pipeline once"),
    "autocast around the call": (under_autocast, "got another autocast"),
    "no gradients around the call": (without_gradients, "got another grad mode"),
    "None for one of them": (none_for_one, r"got None for \[1\] of 3"),
    "no loss": (no_loss, "must return the loss"),
    "no call": (without_call, "must call the pipeline once"),
    "no call for one of them": (without_call_once, "none for micro-batch 1"),
    "no call for the first of them": (without_call_at_first, "none for micro-batch 0, and one for"),
    "a loss of several elements": (several_elements, r"must have one element: got shape \(3, 3\)"),
    "weights of some": (weight_of_some, "for every micro-batch or for none"),
    "no weight": (no_weight_at_all, "more than 0"),
}


@with_and_without_threads
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_step_must_not_do(name: str, model: GPipe) -> None:
    step, message = REFUSED[name]
    error = (
        TypeError if step is no_loss else ValueError if step is no_weight_at_all else RuntimeError
    )
    with pytest.raises(error, match=message):
        model.by_micro_batch(lambda x: step(model, x), rows(7))

    check_mean(model)


@with_and_without_threads
@pytest.mark.parametrize("calls", [True, False])
def test_none_for_all_skips_the_batch(calls: bool, model: GPipe) -> None:
    def step(x: Tensor) -> None:
        if calls:
            model(x)

    outcome = model.by_micro_batch(step, rows(7))

    assert outcome.loss is None
    assert outcome.results == [None] * 3
    assert not gradients(model)


def test_step_without_gradients(model: GPipe) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="is for training"):
        model.by_micro_batch(lambda x: model(x).mean(), rows(7))


@pytest.mark.parametrize("again", ["backward", "create_graph"])
def test_second_backward(again: str, model: GPipe) -> None:
    loss = model.by_micro_batch(lambda x: model(x).mean(), rows(7)).loss
    assert loss is not None
    if again == "backward":
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once through|twice.*for layer in self"):
        loss.backward(create_graph=again == "create_graph")


@with_and_without_threads
def test_finally_block_that_raises(model: GPipe) -> None:
    """That of a later micro-batch, whose code is suspended when the first one fails."""

    def step(x: Tensor) -> Tensor:
        try:
            model(x)
            raise OwnError
        finally:
            if len(x) == 2:
                raise ValueError("in the end")

    with pytest.raises(OwnError) as caught:
        model.by_micro_batch(step, rows(7))

    assert "while training_step was ended: ValueError: in the end" in caught.value.__notes__
    check_mean(model)


def test_finally_block_that_calls_again(model: GPipe) -> None:
    def step(x: Tensor) -> Tensor:
        try:
            loss = model(x).mean()
            if len(x) == 2:
                raise OwnError
            return loss
        finally:
            if len(x) == 3:
                with nullcontext():
                    model(x)

    with pytest.raises((OwnError, RuntimeError)):
        model.by_micro_batch(step, rows(7))

    check_mean(model)
