"""Transparency: minimal cases of the faults that drawn models once found."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import (
    Call,
    Unused,
    assert_same,
    assert_same_step,
    gradients,
    rows,
    step,
    whole_batch_loss,
)
from tests.support.pipes import Pipe, every_mode
from tests.support.process import seeded
from tests.support.vocabulary import Counter, Frozen, W
from tests.support.waiting import PATIENCE


@every_mode
def test_edit_in_place_of_what_passes_twice(pipe: Pipe) -> None:
    """Once each leaf was copied by itself, so the edit of one was not seen in the other."""
    module = nn.Sequential(
        nn.Linear(W, W),
        Call(lambda x: (x, x)),
        Call(lambda pair: (pair[0].relu_(), pair[1])),
        Call(sum),
    ).double()

    assert_same_step(pipe(module), module, rows(8))


@every_mode
def test_hooks_of_a_parameter_that_took_no_part(pipe: Pipe) -> None:
    """Once they were called with None, on which a hook that computes with the gradient fails."""
    pipeline = pipe(nn.Sequential(nn.Linear(W, W), Unused(W)).double())
    unused, called = pipeline.get_parameter("1.unused"), []
    unused.register_hook(lambda gradient: called.append("gradient"))
    unused.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))

    step(pipeline, rows(8))

    assert not called


@every_mode
def test_parameter_that_its_layer_edits(pipe: Pipe) -> None:
    """Once the layer's own edit counted as one by the user, so training was refused."""
    module = nn.Sequential(nn.Embedding(5, W, max_norm=0.5), nn.Linear(W, W)).double()
    tokens = torch.arange(8) % 5

    assert_same_step(pipe(module), module, tokens)


def test_evaluation_that_draws_between_forward_and_backward(pipe: Pipe) -> None:
    """Once a second run wrote to all buffers, saved ones too, so backward of the first failed."""
    noise = Call(lambda x: x + 0 * torch.rand_like(x))
    module = nn.Sequential(Frozen(nn.BatchNorm1d(W)), noise).double().train()
    pipeline = pipe(module, mode="never")

    for each in (pipeline, module):
        output = each.train()(rows(8))
        with torch.no_grad():
            each.eval()(rows(8))
        whole_batch_loss(output).backward()

    assert_same(gradients(pipeline), gradients(module))


@every_mode
def test_buffer_of_a_model_that_starts_to_draw(pipe: Pipe) -> None:
    """Once a forward that was run again, to know its draws, moved the buffer on twice."""
    module = nn.Sequential(Counter(edits=True), nn.Dropout(0.0), nn.Linear(W, W)).double()
    pipeline = pipe(module, chunks=4)

    for p in (0.0, 0.5):
        dropout = pipeline[1]
        assert isinstance(dropout, nn.Dropout)
        dropout.p = p
        step(pipeline, rows(8))

    assert pipeline.get_buffer("0.calls") == 8  # two steps of four micro-batches


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layer_that_checkpoints_itself_and_draws(use_reentrant: bool, pipe: Pipe) -> None:
    """Once forward drew from a private stream, backward from the generator: other masks."""
    drop = Call(lambda x: checkpoint(F.dropout, x, use_reentrant=use_reentrant))
    pipeline = pipe(nn.Sequential(nn.Linear(W, W), drop).double(), chunks=1, mode="never")

    with pytest.raises(RuntimeError, match="must not draw random numbers under torch.utils"):
        step(pipeline, rows(8))


def test_layer_that_starts_to_draw_while_another_draws(pipe: Pipe) -> None:
    """Once one put the generator back to before both, so the other's draws were not noticed."""
    late, drawing, drawn = (threading.Event() for _ in range(3))

    def draw_late(x: Tensor) -> Tensor:
        if not late.is_set() or x[0, 0] < 0:
            return x
        drawing.wait(PATIENCE)
        y = F.dropout(x)
        drawn.set()
        return y

    @torch.library.custom_op(
        "tests::draw_slowly", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
    )
    def draw_slowly(x: Tensor) -> Tensor:
        y = torch.rand_like(x)
        drawing.set()
        drawn.wait(PATIENCE)
        return y

    torch.manual_seed(1)
    layers = [Call(draw_late), nn.Linear(W, W), Call(lambda x: x + draw_slowly(x.detach()))]
    module = nn.Sequential(*layers, nn.Linear(W, W)).double()
    x = torch.cat([-torch.ones(6, W), torch.ones(2, W)]).double()  # late only in the last two rows
    steps = []
    for mode in ("never", "always"):
        pipeline = pipe(module, chunks=4, mode=mode)
        late.clear()
        drawn.set()
        step(pipeline, x)
        pipeline.zero_grad()
        late.set()
        drawing.clear()
        drawn.clear()
        with seeded():
            steps.append(step(pipeline, x)._asdict())

    assert_same(*steps)


def test_forward_that_starts_to_draw_after_another_with_batch_norm(pipe: Pipe) -> None:
    """Once a second run wrote to running statistics that a graph had saved: its backward failed."""
    module = nn.Sequential(nn.BatchNorm1d(W), nn.Dropout(0.0)).double()
    pipeline = pipe(module, mode="never", deferred_batch_norm=False)
    pipeline(rows(8))
    first = pipeline(rows(8))
    dropout = pipeline[1]
    assert isinstance(dropout, nn.Dropout)
    dropout.p = 0.5
    (first.sum() + pipeline(rows(8)).sum()).backward()


@every_mode
def test_input_returned_twice_beside_a_tensor_from_outside(pipe: Pipe) -> None:
    """Once the gradient of an input that a stage returned twice was doubled, in recomputations."""
    outside = torch.ones(W, dtype=torch.float64, requires_grad=True)
    module = nn.Sequential(nn.Linear(W, W), Call(lambda x: (x + outside, x, x))).double()

    assert_same_step(pipe(module), module, rows(8))
