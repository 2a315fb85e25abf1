"""Same numbers: with ``cores``, an action has as many threads wherever the workers run.

Sums over another number of threads have other last bits. So the number is read off the schedule.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from tests.support.faults import OwnError
from tests.support.models import Call
from tests.support.processes import assert_equal, processes
from tests.support.ranks import Pool

CORES, M = 4, 3
# By stage, in order: a worker alone has all cores, one of two half of them.
FORWARD, BACKWARD = [[4, 2, 2], [2, 2, 4]], [[2, 2, 4], [4, 2, 2]]

Seen = list[list[int]]
Make = Callable[..., GPipe]


@pytest.fixture
def make() -> Any:
    """Makes pipelines of two stages on the CPU, closed after the test."""
    made: list[GPipe] = []

    def pipeline(layers: Sequence[nn.Module], **options: Any) -> GPipe:
        devices = ["cpu"] * len(layers)
        balance = [1] * len(layers)
        made.append(
            GPipe(
                nn.Sequential(*layers),
                balance,
                devices=devices,
                chunks=M,
                activation_checkpointing="never",
                cores=CORES,
                **options,
            )
        )
        return made[-1]

    yield pipeline
    for each in made:
        each.close()


def noting(seen: list[int]) -> Call:
    """A layer that notes the number of threads, in forward and in backward."""

    def note(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda _: seen.append(torch.get_num_threads()))
        return y

    return Call(note)


@pytest.mark.parametrize("threads", [True, False])
def test_worker_whose_neighbour_waits_has_its_cores(make: Make, threads: bool) -> None:
    seen: Seen = [[], []]
    pipeline = make(list(map(noting, seen)), threads=threads)

    pipeline(torch.ones(M, 2, requires_grad=True)).sum().backward()

    assert [each[:M] for each in seen] == FORWARD
    assert [each[M:] for each in seen] == BACKWARD


@pytest.mark.parametrize("threads", [True, False])
def test_with_a_loss_for_each_micro_batch(make: Make, threads: bool) -> None:
    """The bubbles are at both ends of a phase."""
    seen: Seen = [[], []]
    layers = [nn.Sequential(nn.Linear(2, 2), noting(each)) for each in seen]
    pipeline = make(layers, threads=threads)

    outcome = pipeline.by_micro_batch(lambda x: pipeline(x).sum(), torch.ones(M, 2))
    assert outcome.loss is not None
    outcome.loss.backward()

    # stage 0 | F0 F1 .  B0 B0 F2 B1 B1 .  B2 B2
    # stage 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    assert {frozenset(each) for each in seen} == {frozenset([2, 4])}
    assert seen[0][0] == seen[0][-1] == CORES


def results(owners: tuple[int, ...] | None, threads: bool = True) -> list[Tensor]:
    """The output and the gradients of a step whose sums depend on the number of threads."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), Large()) for _ in range(2)))
    devices = ["cpu"] * 2
    pipeline = GPipe(
        layers, [1, 1], devices=devices, chunks=M, threads=threads, cores=2, **processes(owners)
    )
    try:
        output = pipeline(torch.randn(M, 64))
        output.square().mean().backward()
    finally:
        pipeline.close()
    own = [p.grad for p in pipeline.parameters() if p.grad is not None]
    return [output.detach(), *own]


class Large(nn.Module):
    """Scales by a sum over many weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(400_000))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.square().mean()


def test_results_are_the_same_to_the_bit(two_ranks: Pool) -> None:
    expected = results(None)
    inline = results(None, threads=False)
    (output, *first), (_, *last) = two_ranks.run(results, (0, 1))

    assert_equal(inline, expected)
    assert_equal([output, *first, *last], expected)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_callers_threads_stay(make: Make, threads: bool, fails: bool) -> None:
    def fail(x: Tensor) -> Tensor:
        if fails:
            raise OwnError
        return x

    pipeline = make([nn.Linear(2, 2), Call(fail)], threads=threads)
    before, found = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        for _ in range(2):
            try:
                pipeline(torch.ones(M, 2))
            except OwnError:
                assert fails
            later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            later.start()
            later.join()
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)

    assert found == [3] * 4


@pytest.mark.parametrize("cores", [0, True, 1.5, "all"])
def test_what_is_no_number_of_cores(cores: Any) -> None:
    with pytest.raises(ValueError, match="cores must be None or a positive integer: got"):
        GPipeStrategy([1, 1], cores=cores)
    with pytest.raises(ValueError, match="cores must be None or a positive integer: got"):
        GPipe(nn.Sequential(nn.Identity()), [1], cores=cores)


def test_stages_that_have_no_cores() -> None:
    layers = nn.Sequential(nn.Linear(2, 2, device="meta"))

    with pytest.raises(ValueError, match="got cores=2 for stages on meta. Leave it out."):
        GPipe(layers, [1], devices=["meta"], cores=2)
