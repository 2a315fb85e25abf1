"""verify_step() compares the loss of a batch with those of its micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe import GPipe, StepParity, verify_step
from tests.support.models import Centred, gradients
from tests.support.pipes import Pipe, with_and_without_threads

Criterion = Callable[[Tensor, Tensor], Any]  # of the head's output, and of the classes
BATCH = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(10, 3), torch.arange(10) % 4 % 3
PADDING = -100


def layers(*within: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *within, nn.Linear(4, 4), nn.Tanh()).double()


def stepping(model: GPipe, head: nn.Module, criterion: Criterion) -> Callable[[Any], Any]:
    return lambda batch: criterion(head(model(batch[0])), batch[1])


@pytest.fixture
def head() -> nn.Module:
    return nn.Linear(4, 3).double()


def found(
    pipe: Pipe,
    head: nn.Module,
    criterion: Criterion,
    *within: nn.Module,
    rows: int = 10,
    **options: Any,
) -> StepParity:
    model = pipe(layers(*within), mode="never", **options)
    batch = tuple(x[:rows] for x in BATCH)
    parity = verify_step(model, stepping(model, head, criterion), batch, around=head)
    assert parity is not None
    return parity


def unpadded(y: Tensor) -> Tensor:
    """Classes with padding, of which micro-batches have different numbers."""
    return y.where(y != 2, PADDING)


def over_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, unpadded(y))


def weighted(output: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": over_tokens(output, y), "loss_weight": (unpadded(y) != PADDING).sum()}


def summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="sum")


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(y)))


def weighted_wrongly(output: Tensor, y: Tensor) -> dict[str, Any]:
    return {"loss": F.cross_entropy(output, y), "loss_weight": len(y) ** 2}


@with_and_without_threads
@pytest.mark.parametrize("criterion", [F.cross_entropy, weighted])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_mean(pipe: Pipe, head: nn.Module, criterion: Criterion, schedule: Any) -> None:
    model = pipe(layers(nn.Dropout()), mode="never")
    step = stepping(model, head, criterion)

    parity = verify_step(model, step, BATCH, schedule=schedule, around=head)

    assert parity is not None
    parity.check()
    assert parity.loss.difference is None
    assert parity.loss.microbatches == 3
    assert {kind: len(each) for kind, each in parity.loss.compared.items()} == {
        "loss": 1,
        "gradients": 6,
    }
    by = "loss_weight" if criterion is weighted else "rows"
    assert str(parity.loss).startswith(
        "verified: a step on the whole batch and one for each of 3 micro-batches (weighted by "
        f"{by}) agree."
    )


@pytest.mark.parametrize(
    "criterion, cure",
    [
        (summed, "It is the sum of theirs, of which the mean is taken: return a mean over rows"),
        (over_tokens, "return of how many: {'loss': loss, 'loss_weight': number}"),
        (contrastive, "compares the rows of a batch with one another"),
        (weighted_wrongly, "'loss_weight' must be the number of what the loss is a mean over"),
    ],
)
def test_no_mean(pipe: Pipe, head: nn.Module, criterion: Criterion, cure: str) -> None:
    parity = found(pipe, head, criterion)

    with pytest.raises(RuntimeError) as caught:
        parity.check()
    message = str(caught.value)
    assert message == str(parity.loss)
    assert message.startswith("the losses of micro-batches must make that of the batch: between ")
    assert cure in message
    assert "schedule='fill_drain'" in message


class Stateful(nn.Linear):
    """A head whose output depends on what earlier calls have left."""

    centre: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.kind = kind
        self.calls = 0
        self.seen: list[Tensor] = []
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        match self.kind:
            case "calls":
                self.calls += 1
                return y / self.calls
            case "seen":
                self.seen.append(y.detach().mean())
                return y / len(self.seen)
            case "centre":
                self.centre.lerp_(y.detach().mean(0), 0.5)
                return y - self.centre
        return y * torch.rand(3, generator=self.generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["calls", "seen", "centre", "generator"])
def test_state_is_named(pipe: Pipe, kind: str) -> None:
    """The error told of sums and contrastive losses only."""
    parity = found(pipe, Stateful(kind), F.cross_entropy)

    assert parity.loss.changed == (kind,)
    with pytest.raises(RuntimeError, match=rf"changes '{kind}', .*: if the loss depends on it, wr"):
        parity.check()


class Sign(torch.autograd.Function):
    """A gradient that depends on the number of rows, of a loss that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * len(gradient)


def test_gradients_alone(pipe: Pipe, head: nn.Module) -> None:
    parity = found(pipe, head, lambda output, y: F.cross_entropy(Sign.apply(output), y))

    with pytest.raises(RuntimeError, match=r"the gradient of '\w+' differs by up to"):
        parity.check()


def test_layer_that_mixes_rows(pipe: Pipe, head: nn.Module) -> None:
    """It is named, and is not taken for a fault of the loss."""
    parity = found(pipe, head, F.cross_entropy, Centred(), rows=9)

    assert parity.loss.difference is None
    with pytest.raises(RuntimeError, match=r"the output of layer 1 \('1', Centred"):
        parity.check()


# Known reasons.


def test_step_that_draws(pipe: Pipe, head: nn.Module) -> None:
    parity = found(pipe, head, lambda out, y: F.cross_entropy(out * torch.rand_like(out), y))

    parity.check()
    assert parity.loss.explained
    assert "known reason: it draws random numbers, others for each" in str(parity)


def test_batch_norm_around(pipe: Pipe) -> None:
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    before = head[0].get_buffer("running_mean").clone()

    parity = found(pipe, head, F.cross_entropy)

    parity.check()
    assert "known reason: '0' is a BatchNorm1d, which normalises by micro-batch" in str(parity)
    torch.testing.assert_close(head[0].running_mean, before, rtol=0, atol=0)


def test_batch_norm_in_a_stage_conceals_no_fault(pipe: Pipe, head: nn.Module) -> None:
    """It normalises the same micro-batches in both runs, if these have equally many rows."""
    norm = nn.BatchNorm1d(4)
    assert found(pipe, head, F.cross_entropy, norm, rows=9).loss.difference is None
    assert not found(pipe, head, contrastive, norm, rows=9).loss.explained


def test_amplified_rounding(pipe: Pipe, head: nn.Module) -> None:
    def steep(output: Tensor, y: Tensor) -> Tensor:
        error = len(y) * 2e-16  # which is less than rounding
        return (output * (1 + error) * 1e10).sin().mean()

    parity = found(pipe, head, steep)

    parity.check()
    assert "known reason: rounding alone changes it about as much" in str(parity)


def test_step_that_does_not_repeat(pipe: Pipe, head: nn.Module) -> None:
    calls = itertools.count(1)
    parity = found(pipe, head, lambda output, y: next(calls) * F.cross_entropy(output, y))

    with pytest.raises(RuntimeError, match="must compute the same from the same batch to be veri"):
        parity.check()


def test_step_that_skips_the_batch(pipe: Pipe) -> None:
    model = pipe(layers(), mode="never")

    assert verify_step(model, lambda batch: None, BATCH) is None


# Nothing else changes.


class Noting(nn.Linear):
    """Keeps what it did in attributes, buffers and generators."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.calls: list[int] = []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        self.total += len(x)
        return super().forward(x) * torch.rand(())


def steps(pipe: Pipe, *, verified: bool) -> list[Any]:
    """What some steps with random numbers come to."""
    torch.manual_seed(3)
    head = Noting()
    model = pipe(layers(nn.Dropout(), nn.BatchNorm1d(4)), mode="never")
    timelines: list[Any] = []
    model.observe(timelines.append)
    x = BATCH[0].clone()

    def step(x: Tensor) -> Tensor:
        return head(model(x.mul_(0.9))).square().mean()

    if verified:
        assert verify_step(model, step, x, around=head) is not None
        assert model.timeline is None
    assert not gradients(head)
    losses = []
    for _ in range(2):
        loss = model.by_micro_batch(step, x, around=head).loss
        assert loss is not None
        loss.backward()
        losses.append(loss.detach())
    assert len(timelines) == 2
    state = {**model.state_dict(), **{f"head.{k}": v for k, v in head.state_dict().items()}}
    return [losses, gradients(model), gradients(head), state, head.calls, torch.rand(3), x]


@with_and_without_threads
def test_steps_after_it_are_the_same_to_the_bit(pipe: Pipe) -> None:
    torch.testing.assert_close(
        steps(pipe, verified=True), steps(pipe, verified=False), rtol=0, atol=0
    )
