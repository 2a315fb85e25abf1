"""Cost: with a loss for each micro-batch, stage j of n holds at most n - j of them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe.core.schedules import ByMicroBatch
from tests.support.meters import Meter, saving
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "no_collector")

N, M, ROWS, WIDTH, CLASSES = 4, 32, 16, 64, 4096


class Around(nn.Module):
    """An embedding before the pipeline and a head after it, which makes logits of many classes."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH).requires_grad_(trained)
        self.head = nn.Linear(WIDTH, CLASSES)


class Alive(nn.Module):
    """Counts the micro-batches that are between its forward and its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        x.register_hook(self.ended)
        return x

    def ended(self, gradient: Tensor) -> None:
        self.now -= 1


@with_and_without_threads
def test_micro_batches_alive(pipe: Pipe) -> None:
    alive = [Alive() for _ in range(N)]
    layers = [nn.Sequential(nn.Linear(3, 3), each, nn.Tanh()) for each in alive]
    pipeline = pipe(nn.Sequential(*layers), stages=N, chunks=9, mode="never", copy=False)

    pipeline.by_micro_batch(lambda x: pipeline(x).mean(), torch.ones(9, 3))

    assert [each.most for each in alive] == [4, 3, 2, 1]


@with_and_without_threads
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("trained", [True, False])
def test_saved_bytes(trained: bool, schedule: ByMicroBatch, pipe: Pipe) -> None:
    """Embedding and head are those of a micro-batch; what is saved for the whole batch is 9.5 MB.

    ``python -m benchmarks.saved_bytes`` prints what is kept, schedule by schedule.
    """
    around = Around(trained=trained)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * N)]
    layers = nn.Sequential(*blocks)
    pipeline = pipe(layers, stages=N, chunks=M, mode="never", copy=False)
    x = torch.arange(M * ROWS)
    batch = x % 7, x % CLASSES

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(around.head(pipeline(around.embedding(x))), y)

    whole, meter = Meter(), Meter()
    parameters = nn.ModuleList([layers, around])
    with saving(whole, parameters):
        step(batch).backward()
    with saving(meter, parameters):
        run = pipeline.by_micro_batch
        loss = run(step, batch, schedule=schedule, around=around).loss
    assert loss is not None
    assert meter.now == 0  # all backwards have run
    loss.backward()

    assert all(p.grad is not None for p in around.head.parameters())
    assert whole.peak > 9.4e6
    assert meter.peak < (0.4e6 if schedule == "1f1b" else 0.5e6)
