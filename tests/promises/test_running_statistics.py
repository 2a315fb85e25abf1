"""Transparency: running statistics of batch norms are those of the whole mini-batch.

They are updated once per mini-batch, for any micro-batches, and not again on recomputation.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.models import assert_same, assert_same_step, rows, step
from tests.support.pipes import M, Pipe, every_mode, with_and_without_threads

W = 3


@with_and_without_threads
@every_mode
def test_running_statistics_of_batch_norms(pipe: Pipe) -> None:
    # Only the first normalises what the plain module's does: the second sees micro-batches.
    module = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh()).double()
    pipeline = pipe(module)

    for seed in range(3):
        batch = rows(10, seed=seed)
        step(pipeline, batch)
        module(batch)

    assert_same(dict(pipeline.named_buffers()), dict(module.named_buffers()))
    pipeline.eval()
    with torch.no_grad():
        module[0].load_state_dict(pipeline[0].state_dict())
        assert_same(pipeline(rows(5)), module.eval()(rows(5)))


@with_and_without_threads
@every_mode
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_instance_norms(pipe: Pipe, momentum: float | None) -> None:
    """Once they were updated once per micro-batch, and in each by fewer rows."""
    norm = nn.InstanceNorm1d(W, track_running_stats=True, affine=True)
    norm.momentum = momentum
    module = nn.Sequential(
        nn.Conv1d(2, W, 2), norm, nn.Tanh(), nn.InstanceNorm1d(W, track_running_stats=True)
    ).double()
    pipeline = pipe(module)

    for seed in range(3):
        batch = rows(7, 10, seed=seed).view(7, 2, 5)
        step(pipeline, batch)
        module(batch)

    assert_same(dict(pipeline.named_buffers()), dict(module.named_buffers()))


@with_and_without_threads
@pytest.mark.parametrize("deferred", [True, False])
def test_evaluation_without_running_statistics(pipe: Pipe, deferred: bool) -> None:
    """Once each micro-batch was normalised by itself, where the plain module takes all rows."""
    norm = nn.BatchNorm1d(W, track_running_stats=False)
    module = nn.Sequential(nn.Linear(W, W), nn.Sequential(norm, nn.Tanh()), nn.Linear(W, W))
    pipeline = pipe(module.double(), deferred_batch_norm=deferred)

    assert_same_step(pipeline.eval(), module.eval(), rows(7))
    with torch.no_grad():
        assert_same(pipeline(rows(7)), module(rows(7)))
    assert micro_batches(pipeline) == 1

    pipeline.train()(rows(7))
    assert micro_batches(pipeline) == M


def test_evaluation_with_running_statistics(pipe: Pipe) -> None:
    norms = nn.BatchNorm1d(W), nn.InstanceNorm1d(W)
    pipeline = pipe(nn.Sequential(*norms).double()).eval()

    pipeline(rows(7, 5 * W).view(7, W, 5))

    assert micro_batches(pipeline) == M


def micro_batches(pipeline: GPipe) -> int:
    assert pipeline.timeline is not None
    return pipeline.timeline.schedule.m


class Around(nn.Module):
    """Calls the function of a batch norm that it holds, instead of the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(W)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, training=self.training
        )


@every_mode
@pytest.mark.parametrize("deferred", [True, False])
def test_running_statistics_that_another_module_updates(pipe: Pipe, deferred: bool) -> None:
    """They are updated once per micro-batch. Once each recomputation updated them again."""
    plain = nn.Sequential(nn.Linear(W, W), Around(), nn.Linear(W, W)).double()
    pipeline = pipe(plain, deferred_batch_norm=deferred)

    for seed in range(2):
        batch = rows(7, seed=seed)
        step(pipeline, batch)
        for part in batch.tensor_split(M):
            plain(part)

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_batch_norm_trains_on_whatever_it_would_train_on(count: int, pipe: Pipe) -> None:
    """Once 9 rows in 8 chunks made micro-batches of one row, on which a batch norm raises."""
    module = nn.Sequential(nn.BatchNorm1d(W), nn.Linear(W, W)).double()
    pipeline = pipe(module, chunks=8)

    for each in (module, pipeline):
        each(rows(count)).sum().backward()

    assert_same(dict(pipeline.named_buffers()), dict(module.named_buffers()))


@pytest.mark.parametrize("batch_size, chunks", [(3, 4), (9, 8)])
def test_running_statistics_with_fewer_micro_batches(
    pipe: Pipe, batch_size: int, chunks: int
) -> None:
    """torchgpipe 0.0.7: waited for `chunks` micro-batches, so updates slipped to later steps."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()).double()
    pipeline = pipe(plain, chunks=chunks)

    for seed in range(3):
        x = rows(batch_size, width=12, seed=seed).reshape(batch_size, 3, 4)
        for module in (plain, pipeline):
            module(x)

    assert pipeline.get_buffer("0.num_batches_tracked") == 3
    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))


def test_running_variance_of_few_large_values(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: kept x and x² summed up, so the variance was biased and lost its digits."""
    pipeline = pipe(nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Identity()), chunks=2)
    x = 5000.1 + torch.tensor([[-1.5], [-0.5], [0.5], [1.5]])

    pipeline(x)

    variance = pipeline.get_buffer("0.running_var").double()
    torch.testing.assert_close(variance, x.double().var(0), rtol=1e-4, atol=0)


@every_mode
@pytest.mark.parametrize("dtype, length", [(torch.float16, 6000), (torch.bfloat16, 1)], ids=str)
def test_running_statistics_in_half_precision(pipe: Pipe, dtype: torch.dtype, length: int) -> None:
    """Once each micro-batch rounded them, and in float16 a sum of squares over 65504 overflowed."""
    plain = nn.Sequential(nn.BatchNorm1d(W, momentum=1.0), nn.Flatten())
    x = (100 + rows(16, W * length).view(16, W, length)).to(dtype)
    pipeline = pipe(deepcopy(plain).to(dtype), chunks=8)

    pipeline(x)
    plain(x.float())

    buffers = dict(plain.to(dtype).named_buffers())
    torch.testing.assert_close(dict(pipeline.named_buffers()), buffers)


@every_mode
def test_statistics_of_the_first_step(pipe: Pipe) -> None:
    """torch 2.13: ran the layers on memory never written to, to learn shapes: means of 4e14."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Tanh()).double()
    seen: list[Tensor] = []
    pipeline = pipe(plain)
    pipeline[2].register_forward_pre_hook(lambda _, x: seen.append(x[0]))

    for module in (plain, pipeline):
        module(rows(8))

    assert pipeline.get_buffer("2.num_batches_tracked") == 1
    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))
    assert_same(torch.cat(seen), plain[:2](rows(8)))
