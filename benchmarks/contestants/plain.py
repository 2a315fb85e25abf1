"""One device and no pipeline: the whole mini-batch at once, or micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.contestants.task import Task, stepping
from benchmarks.harness import Contestant


def plain(task: Task, *, name: str = "plain", threads: int | None = None) -> Contestant:
    """The whole mini-batch through the plain nn.Sequential."""
    module = task.copy_of_module()
    return task.contestant(name, module, list(module.parameters()), threads=threads)


def accumulated(
    task: Task,
    *,
    chunks: int,
    stages: Sequence[int] = (),
    name: str = "plain, gradients accumulated",
    threads: int | None = None,
) -> Contestant:
    """Micro-batches one after another, each with its own backward.

    Args:
        task: What to do.
        chunks: The number of micro-batches; they must be equally large.
        stages: How many layers each ``torch.utils.checkpoint`` is around; none by default.
        name: As the report has it.
        threads: The number of intra-op threads.
    """
    module = task.copy_of_module()
    parts = _parts(module, stages)
    assert len(task.x) % chunks == 0, "the mean of the losses is that of the whole only then"

    def step() -> None:
        module.zero_grad()
        pieces = zip(task.x.chunk(chunks), task.target.chunk(chunks), strict=True)
        for x, target in pieces:
            y = x
            for part in parts:
                y = checkpoint(part, y, use_reentrant=False) if stages else part(y)
            (task.loss(y, target) / chunks).backward()

    return stepping(name, step, list(module.parameters()), threads=threads)


def _parts(module: nn.Sequential, stages: Sequence[int]) -> list[nn.Module]:
    if not stages:
        return [module]
    ends = [sum(stages[: k + 1]) for k in range(len(stages))]
    return [module[end - size : end] for end, size in zip(ends, stages, strict=True)]


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    """A loss without a reduction that could differ."""
    return (y - target).square().mean()
