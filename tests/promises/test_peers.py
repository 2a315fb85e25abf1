"""What was found by running torchgpipe and torch.distributed.pipelining, and is not so here.

Each defect has one small test, which fails on what the peer does. Most are proved at length
elsewhere; this file is the list.
"""

from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe.core.plan.balance.solver import solve
from tests.support.faults import no_time_out
from tests.support.models import (
    Call,
    assert_same,
    assert_same_step,
    gradients,
    perceptron,
    rows,
    step,
)
from tests.support.pipes import Pipe, every_mode

CPUS = ["cpu", "cpu"]


# torchgpipe.


def test_tensors_with_different_numbers_of_rows(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: paired up the pieces of tensors, so rows without a partner were lost."""
    pipeline = pipe(nn.Sequential(nn.Identity(), nn.Identity()), chunks=5)

    with pytest.raises(ValueError, match=r"got input\[0\] of shape \(8, 3\), input\[1\] of shape"):
        pipeline((rows(8), rows(5)))


def test_autocast_in_the_stages(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: autocast is of a thread, so stages ran in float32 all the same."""
    pipeline = pipe(perceptron(4).float())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = pipeline(torch.ones(8, 3))

    assert y.dtype is torch.bfloat16


def test_inference_mode_in_the_stages(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: inference mode is of a thread, so stages ran without."""
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return x

    with torch.inference_mode():
        y = pipe(nn.Sequential(Call(look), Call(look)))(rows(8))

    assert seen == [True] * 8
    assert y.is_inference()


def test_saved_tensors_hooks_in_the_stages(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: the hooks are of a thread, so offloading activations had no effect."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    pipeline = pipe(perceptron(4), mode="never")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pipeline(rows(8))

    assert len(packed) >= 4 * 4  # of each micro-batch something by each layer


def test_flop_counter_in_the_stages(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: the counter is of a thread, so it counted none."""
    counts = []
    for module in (perceptron(4), pipe(perceptron(4))):
        with FlopCounterMode(display=False) as counter:
            module(rows(8))
        counts.append(counter.get_total_flops())

    assert counts[1] == counts[0] > 0


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


def test_state_dict_with_batch_norms(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: added the sums of its batch norms to the state dict."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    pipeline = pipe(plain)

    pipeline(rows(8))

    assert list(pipeline.state_dict()) == list(plain.state_dict())


@every_mode
def test_integers_as_output(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: took any output to carry the graph, so integers failed in backward."""
    plain = nn.Sequential(
        nn.Linear(3, 3), Call(lambda x: (x.argmax(1), x > 0, x)), nn.Identity()
    ).double()
    pipeline = pipe(plain)

    assert_same_step(pipeline, plain, rows(8))


def test_state_dict_of_another_balance(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: named parameters by partition, so only an equal balance could load them."""
    plain = perceptron(6)
    state = pipe(plain, balance=[2, 4]).state_dict()

    for other in (perceptron(6), pipe(perceptron(6), balance=[5, 1])):
        other.load_state_dict(state)
        assert_same(other.state_dict(), plain.state_dict())


@pytest.fixture
def _one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process_group")
@every_mode
def test_distributed_data_parallel_around(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: a gradient came once per micro-batch: "mark a variable ready only once"."""
    plain = nn.Sequential(perceptron(2), perceptron(6), perceptron(2))
    pipeline = pipe(perceptron(6))
    whole = DistributedDataParallel(
        nn.Sequential(deepcopy(plain[0]), pipeline, deepcopy(plain[2])),
        find_unused_parameters=False,
    )
    whole.module.load_state_dict(plain.state_dict())

    for seed in range(3):
        expected = step(plain, rows(8, seed=seed))
        actual = step(whole, rows(8, seed=seed))
        assert_same(actual.output, expected.output)
        assert_same(gradients(whole.module), expected.gradients)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exit_raised_by_a_layer(
    pipe: Pipe, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchgpipe 0.0.7: caught Exception only, so the worker died and its caller hung."""
    no_time_out(monkeypatch)

    def leave(x: Tensor) -> Tensor:
        raise error

    with pytest.raises(error):
        pipe(nn.Sequential(nn.Identity(), Call(leave)))(rows(8))


def test_frozen_first_stage_runs_once(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: recomputed it although nothing in it needs a gradient."""
    calls: list[int] = []
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    module[0].requires_grad_(False)
    pipeline = pipe(module, mode="always")
    pipeline[0].register_forward_hook(lambda *_: calls.append(1))

    pipeline(torch.ones(8, 3)).sum().backward()

    assert len(calls) == 4


def cheapest(costs: tuple[int, ...], stages: int) -> int:
    """The cost of the costliest stage, as low as it can be, by trying every cut."""
    ends = combinations(range(1, len(costs)), stages - 1)
    bounds = ([0, *cut, len(costs)] for cut in ends)
    return min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in bounds)


def test_balance_is_the_best_there_is() -> None:
    """torchgpipe 0.0.7: two of three of its balances could be bettered, by up to 1.62 times."""
    random = Random(0)
    for _ in range(100):
        costs = tuple(random.randint(1, 100) for _ in range(10))
        ends = [0]
        for size in solve(costs, 4):
            ends.append(ends[-1] + size)
        assert max(sum(costs[a:b]) for a, b in pairwise(ends)) == cheapest(costs, 4)


@every_mode
def test_second_backward(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: raised "pop from an empty deque"."""
    loss = pipe(perceptron(4))(rows(8)).sum()
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="must run once through a pipeline's output"):
        loss.backward()


@every_mode
def test_gradients_without_accumulation(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: checkpointing knew backward() only, so autograd.grad() failed."""
    plain = perceptron(4)
    found = [
        torch.autograd.grad(module(rows(8)).exp().sum(), list(module.parameters()))
        for module in (plain, pipe(plain))
    ]

    assert_same(found[1], found[0])


# torch.distributed.pipelining 2.13, as far as it means something in one process.


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


def test_rows_that_do_not_divide(pipe: Pipe) -> None:
    """torch 2.13: returned 8 rows for 7, and failed in backward."""
    plain = perceptron(4)

    assert_same(step(pipe(plain), rows(7))._asdict(), step(plain, rows(7))._asdict())


def test_smaller_batch_after_a_larger_one(pipe: Pipe) -> None:
    """torch 2.13: returned rows of the batch before."""
    plain = perceptron(4)
    pipeline = pipe(plain)

    with torch.no_grad():
        pipeline(rows(8))
        assert_same(pipeline(rows(4, seed=1)), plain(rows(4, seed=1)))
    assert_same_step(pipeline, plain, rows(3))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_fewer_rows_than_chunks(pipe: Pipe, batch_size: int) -> None:
    """torch 2.13: raised an AssertionError on one rank and a ValueError on the other."""
    plain = perceptron(4)

    actual, expected = (step(each, rows(batch_size)) for each in (pipe(plain), plain))

    assert_same(actual._asdict(), expected._asdict())


def test_dicts_between_stages(pipe: Pipe) -> None:
    """torch 2.13: raised that a dict has no size."""

    def both(x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": x["x"].sin() * x["scale"], "scale": x["scale"].cos()}

    plain = nn.Sequential(*(Call(both) for _ in range(4)))
    batch = {"x": rows(8), "scale": rows(8, seed=1)}

    assert_same(step(pipe(plain), batch)._asdict(), step(plain, batch)._asdict())


class OwnError(Exception):
    pass


def test_error_in_a_later_stage(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13: made a RuntimeError of it, and the other rank waited for its timeout."""
    no_time_out(monkeypatch)

    def fail(x: Tensor) -> Tensor:
        raise OwnError("of the layer")

    with pytest.raises(OwnError, match="of the layer"):
        pipe(nn.Sequential(nn.Identity(), Call(fail)))(rows(8))
