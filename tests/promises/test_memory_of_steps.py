"""Promise: of a step with a loss for each micro-batch, stage j of n holds n - j of them at most."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.meters import Meter, saving
from tests.support.pipes import Pipe, with_and_without_threads

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "no_collector")

N, ROWS, CLASSES = 4, 4, 256


class Around(nn.Module):
    """An embedding before the pipeline and a head after it, which makes logits of many classes."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8).requires_grad_(trained)
        self.head = nn.Linear(8, CLASSES)


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
@pytest.mark.parametrize("trained", [True, False])
def test_head_and_embedding_of_one_micro_batch_are_alive(trained: bool, pipe: Pipe) -> None:
    m = 32
    around = Around(trained=trained)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(N)])
    pipeline = pipe(layers, stages=N, chunks=m, mode="never", copy=False)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(around.head(pipeline(around.embedding(x))), y)

    x = torch.arange(m * ROWS)
    meter = Meter()
    with saving(meter, nn.ModuleList([layers, around])):
        loss = pipeline.by_micro_batch(step, (x % 7, x % CLASSES), around=around).loss
    assert loss is not None
    assert meter.now == 0  # all backwards have run
    loss.backward()

    assert all(p.grad is not None for p in around.head.parameters())
    logits = ROWS * CLASSES * 4
    assert meter.peak < 4 * logits  # of 32 micro-batches
