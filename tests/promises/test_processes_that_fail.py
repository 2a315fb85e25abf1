"""No hang: if one process fails, all report it, and continue or end.

Here are also the tests of ``link`` and ``links``.
"""

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from lightning_gpipe import GPipe, OutOfStep, RankFailed
from lightning_gpipe.core.transport.process_group.wire.tcp_connection import (
    ConnectionBroken,
    TcpConnection,
)
from tests.support.faults import Fuse, OwnError, nothing, throw
from tests.support.models import rows
from tests.support.processes import layers, step
from tests.support.ranks import Failed, Pool, Ranks, group_of


def pipeline_of(module: nn.Sequential, **options: Any) -> GPipe:
    return GPipe(
        module,
        [1, 1, 1],
        devices=["cpu"] * 3,
        chunks=4,
        owners=[0, 1, 2],
        group=group_of(3),
        activation_checkpointing="always",
        **options,
    )


def told(run: Callable[[], object]) -> str:
    """The error that a run ends with, in a line."""
    try:
        run()
    except BaseException as error:
        notes = getattr(error, "__notes__", [])
        return " | ".join([type(error).__name__, str(error), *notes])
    return "none"


def fail_once(rank: int, kind: str, calls: int) -> tuple[str, Tensor]:
    """What a step says in which a layer of ``rank`` fails, and the loss of the next one."""
    module = layers()
    fuses = [each for each in module.modules() if isinstance(each, Fuse)]
    pipeline = pipeline_of(module)
    fuses[rank].light((kind, calls), throw(OwnError("burnt")))
    message = told(lambda: step(pipeline))
    loss = step(pipeline)
    pipeline.close()
    return message, loss


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind, calls", [("forward", 1), ("forward", 5), ("backward", 2)])
def test_error_in_a_layer_is_told_to_all_and_the_next_step_works(
    four_ranks: Pool, rank: int, kind: str, calls: int
) -> None:
    expected = layers()(rows(8)).square().mean()

    found = four_ranks.run(fail_once, rank, kind, calls, among=3)

    for k, (message, loss) in enumerate(found):
        torch.testing.assert_close(loss, expected)
        where = f"of 4 on stage {rank}"
        if k == rank:
            assert message.startswith("OwnError | burnt | raised in ")
        else:
            assert message.startswith(f"RankFailed | rank {rank} (stage {rank}) failed: OwnError")
        assert "burnt" in message
        assert where in message
        assert f"in layer {rank}.1 (Fuse)" in message


def close_and_go_on() -> list[Tensor]:
    pipeline = pipeline_of(layers())
    found = []
    for _ in range(3):
        found.append(step(pipeline))
        pipeline.close()
    return found


def test_pipeline_that_was_closed_runs_again(four_ranks: Pool) -> None:
    expected = layers()(rows(8)).square().mean()

    for losses in four_ranks.run(close_and_go_on, among=3):
        torch.testing.assert_close(torch.stack(losses), expected.detach().expand(3))


def differ(what: str) -> str:
    """What a step says if one process does something else."""
    pipeline = pipeline_of(layers())
    step(pipeline)
    if torch.distributed.get_rank() == 1:
        if what == "mode":
            pipeline.eval()
        elif what == "state":
            torch.manual_seed(5)
        elif what == "step":
            pipeline.engine.step = 7
        elif what == "chunks":
            pipeline.chunks = 2
    with torch.set_grad_enabled(what != "grad" or torch.distributed.get_rank() != 1):
        message = told(lambda: step(pipeline))
    pipeline.close()
    return message


DIFFERENT = {
    "mode": ("with no module in training mode", "with 6 modules in training mode"),
    "grad": ("without gradients", "with gradients"),
    "chunks": ("in 2 micro-batches", "in 4 micro-batches"),
    "step": ("of step 7", "of step 0"),
    "state": ("a forward", "a forward, with the random generators in other states"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_processes_that_do_not_do_the_same_are_told_apart(four_ranks: Pool, what: str) -> None:
    """Whichever of two neighbours notices it first, and tells the others."""
    found = four_ranks.run(differ, what, among=3)

    one, others = DIFFERENT[what]
    assert all("all processes of a pipeline must run the same mini-batches" in m for m in found)
    assert all("rank 1 (stage 1)" in message for message in found)
    assert all(one in message and others in message for message in found), found


def backward_in_turn() -> str:
    """What the backwards of two forwards say, of which one process runs the later one first."""
    pipeline = pipeline_of(layers())
    losses = [pipeline(rows(8, seed=k)).square().mean() for k in range(2)]
    if torch.distributed.get_rank() == 1:
        losses.reverse()
    message = told(lambda: [loss.backward() for loss in losses])
    pipeline.close()
    return message


def test_backwards_in_another_order_are_told_apart(four_ranks: Pool) -> None:
    """Once their gradients were mixed, for the number of the mini-batch was lost."""
    found = four_ranks.run(backward_in_turn, among=3)

    assert all("rank 1 (stage 1)" in message for message in found), found
    assert all("of a later mini-batch" in message for message in found), found


def send_to_one_that_is_lost() -> str:
    """What a step says in which rank 0 finds that as it sends."""
    pipeline = pipeline_of(layers())
    step(pipeline)
    send = TcpConnection.send

    def send_unless_ended(own: TcpConnection, *parts: Any) -> Any:
        if own._rank == 1:
            raise ConnectionBroken("connection closed: Broken pipe")
        return send(own, *parts)

    if torch.distributed.get_rank() != 0:
        return told(lambda: step(pipeline))
    with patch.object(TcpConnection, "send", send_unless_ended):
        return told(lambda: step(pipeline))


def test_process_that_is_lost_as_another_one_sends_is_named(three_ranks: Ranks) -> None:
    """Once the network's own error was raised, which names nobody."""
    three_ranks.start(send_to_one_that_is_lost)

    message = three_ranks.result(0)
    assert message.startswith(
        "RankFailed | rank 1 (stage 1) is lost: connection closed: Broken pipe"
    )


def die(rank: int, how: int) -> str:
    """What a step says in which a layer of ``rank`` ends its process."""
    module = layers()
    fuses = [each for each in module.modules() if isinstance(each, Fuse)]
    pipeline = pipeline_of(module)
    step(pipeline)
    fuses[rank].light(("forward", 2), lambda: os.kill(os.getpid(), how))
    return told(lambda: step(pipeline))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_process_that_dies_is_named_by_the_others(three_ranks: Ranks, rank: int) -> None:
    found = three_ranks.outcomes(die, rank, signal.SIGKILL)

    assert isinstance(found.pop(rank), Failed)
    assert all(f"rank {rank} (stage {rank}) is lost" in message for message in found)


def test_rank_failed_is_an_error_of_the_run() -> None:
    assert issubclass(RankFailed, RuntimeError)
    assert issubclass(OutOfStep, RuntimeError)


def failing_step(pipeline: GPipe, faults: dict[str, Callable[[], None]]) -> None:
    """A step in which the caller's code may fail, which it tells the others."""
    try:
        faults.pop("loader", nothing)()
        loss = pipeline(rows(8)).square().mean()
        faults.pop("loss", nothing)()
        loss.backward()
    except BaseException as error:
        pipeline.tell(error)
        raise


def near(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other)


def fail_often(seed: int, times: int) -> list[str]:
    """What goes wrong over drawn faults: each told to all, the next step that of the module."""
    draw = random.Random(seed)
    module, plain = layers(), layers()
    expected = step(plain)
    gradients = dict(plain.named_parameters())
    fuses = [each for each in module.modules() if isinstance(each, Fuse)]
    pipeline = pipeline_of(module)
    wrong = []
    for k in range(times):
        rank, calls = draw.randrange(3), draw.randrange(4)
        kind = draw.choice(["forward", "recomputation", "backward", "loss", "loader"])
        error = draw.choice([OwnError, KeyboardInterrupt, SystemExit, ValueError])(f"drawn {k}")
        faults: dict[str, Callable[[], None]] = {}
        if kind not in ("loss", "loader"):
            again = 4 * (kind == "recomputation")
            at = ("backward" if kind == "backward" else "forward", calls + again)
            fuses[rank].light(at, throw(error))
        elif torch.distributed.get_rank() == rank:
            faults[kind] = throw(error)
        message = told(partial(failing_step, pipeline, faults))
        if f"drawn {k}" not in message:
            wrong.append(f"{k}: {kind} {calls} on {rank}: {message}")
        pipeline.zero_grad()
        same = torch.allclose(step(pipeline), expected)
        for name, parameter in pipeline.named_parameters():
            same &= parameter.is_meta or near(parameter.grad, gradients[name].grad)
        if not same:
            wrong.append(f"{k}: the step after {kind} {calls} on {rank}")
    pipeline.close()
    return wrong


@pytest.mark.parametrize("seed", range(settings().max_examples // 100))
def test_steps_work_between_drawn_faults(four_ranks: Pool, seed: int) -> None:
    assert four_ranks.run(fail_often, seed, 12, among=3) == [[], [], []]
