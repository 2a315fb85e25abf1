"""No hang: a lost process ends the others and is named; a slow one does not.

Here are also the tests of ``connecting/groups``.
"""

import gc
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.transport.process_group import office
from tests.support.faults import Fuse, OwnError
from tests.support.models import rows
from tests.support.processes import layers, said, step
from tests.support.ranks import Pool, Ranks, group_of, pipeline_threads

BOUND = timedelta(seconds=2)


def pipeline_of(module: nn.Sequential, **options: Any) -> GPipe:
    return GPipe(
        module,
        [1, 1, 1],
        devices=["cpu"] * 3,
        chunks=4,
        owners=[0, 1, 2],
        group=group_of(3),
        **{"lost_after": BOUND, **options},
    )


def stop_in(where: str, rank: int) -> str:
    """What a step says in which ``rank`` is stopped."""
    module = layers()
    fuses = [each for each in module.modules() if isinstance(each, Fuse)]
    pipeline = pipeline_of(module)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    step(pipeline)
    if where == "between steps":
        if torch.distributed.get_rank() == rank:
            stop()
    else:
        fuses[rank].light((where, 2), stop)
    return said(lambda: step(pipeline))


@pytest.mark.parametrize(
    "where, rank, awaited",
    [
        ("forward", 0, "the input of forward of micro-batch"),
        ("backward", 1, "the input of backward of micro-batch"),
        ("between steps", 2, "the output of micro-batch 0"),
    ],
)
def test_stopped_process_is_named_with_what_was_awaited(
    three_ranks: Ranks, where: str, rank: int, awaited: str
) -> None:
    three_ranks.start(stop_in, where, rank)
    found = [three_ranks.result(k) for k in range(3) if k != rank]

    for message in found:
        assert message.startswith(f"RankFailed | rank {rank} (stage {rank}) is lost: nothing was h")
        assert "was awaited" in message
    assert any(awaited in message for message in found)


def pause(where: str, rank: int) -> Tensor:
    """The loss of a step in which ``rank`` pauses for longer than the bound."""
    module = layers()
    fuses = [each for each in module.modules() if isinstance(each, Fuse)]
    pipeline = pipeline_of(module, lost_after=timedelta(seconds=0.5))

    def sleep() -> None:
        time.sleep(1.5)

    step(pipeline)
    if where == "between steps":
        if torch.distributed.get_rank() == rank:
            sleep()
    else:
        fuses[rank].light((where, 2), sleep)
    loss = step(pipeline)
    pipeline.close()
    return loss


@pytest.mark.parametrize("where", ["forward", "backward", "between steps"])
def test_process_that_pauses_for_longer_than_the_bound_goes_on(
    four_ranks: Pool, where: str
) -> None:
    expected = layers()(rows(8)).square().mean()

    for loss in four_ranks.run(pause, where, 1, among=3):
        torch.testing.assert_close(loss, expected)


def close_late() -> list[Tensor]:
    """The losses of two steps, of which rank 1 closes the pipeline late."""
    office.TELL_TIMEOUT = 0.2
    pipeline = pipeline_of(layers())
    found = [step(pipeline)]
    if torch.distributed.get_rank() == 1:
        time.sleep(1.0)
    pipeline.close()
    found.append(step(pipeline))
    pipeline.close()
    return found


def test_process_that_closes_later_than_others_are_patient_goes_on(three_ranks: Ranks) -> None:
    """Once those that ran again before it closed did not hear it any more."""
    expected = layers()(rows(8)).square().mean()

    for losses in three_ranks.run(close_late):
        torch.testing.assert_close(torch.stack(losses), expected.detach().expand(2))


def stop_before_closing() -> str:
    """What a step says, after the pipeline was closed, if rank 1 was stopped before that."""
    office.TELL_TIMEOUT = 0.2
    pipeline = pipeline_of(layers())
    step(pipeline)
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pipeline.close()
    return said(lambda: step(pipeline))


def test_process_that_is_stopped_before_it_closes_is_named(three_ranks: Ranks) -> None:
    """Once nothing was expected of it any more."""
    three_ranks.start(stop_before_closing)

    for k in (0, 2):
        message = three_ranks.result(k)
        assert message.startswith("RankFailed | rank 1 (stage 1) is lost: nothing was heard")


def end_early(how: str) -> str:
    """What a step says that rank 1 does not make."""
    pipeline = pipeline_of(layers(), lost_after=timedelta(seconds=20))  # it is known at once
    step(pipeline)
    if torch.distributed.get_rank() == 1:
        if how == "closes":
            pipeline.close()
        elif how == "ends":
            os._exit(0)
        else:
            del pipeline
            gc.collect()
        return "ended"
    message = said(lambda: step(pipeline))
    pipeline.close()
    return message


@pytest.mark.parametrize(
    "how, text",
    [
        ("closes", "closed the pipeline"),
        ("drops", "closed the pipeline"),
        ("ends", "is lost"),
    ],
)
def test_process_that_ends_early_is_named(three_ranks: Ranks, how: str, text: str) -> None:
    three_ranks.start(end_early, how)

    for k in (0, 2):
        message = three_ranks.result(k)
        assert message.startswith(f"RankFailed | rank 1 (stage 1) {text}")


def raise_outside(when: str) -> tuple[str, list[Tensor]]:
    """What a step says in which the caller's code of rank 1 fails, and the losses of the next."""
    pipeline = pipeline_of(layers())
    fails = torch.distributed.get_rank() == 1

    def fail(now: str) -> None:
        if fails and now == when:
            raise OwnError("of the caller")

    def failing_step() -> None:
        try:
            fail("loader")
            loss = pipeline(rows(8)).square().mean()
            fail("loss")
            loss.backward()
            fail("optimizer")
        except OwnError as error:
            pipeline.tell(error)
            pipeline.tell(error)  # as a second hook does
            raise

    step(pipeline)
    message = said(failing_step)
    if when == "optimizer" and not fails:
        message = said(failing_step)
    losses = [step(pipeline) for _ in range(2)]
    pipeline.close()
    return message, losses


@pytest.mark.parametrize("when", ["loader", "loss", "optimizer"])
def test_error_in_the_callers_code_is_told_and_the_next_step_works(
    four_ranks: Pool, when: str
) -> None:
    expected = layers()(rows(8)).square().mean()

    found = four_ranks.run(raise_outside, when, among=3)

    for k, (message, losses) in enumerate(found):
        if k == 1:
            assert message == "OwnError | of the caller"
        else:
            assert message.startswith(
                "RankFailed | rank 1 (stage 1) failed: OwnError: of the caller"
            )
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def threads_left() -> list[str]:
    """The pipeline's threads after a step and an end."""
    pipeline = pipeline_of(layers())
    step(pipeline)
    during = pipeline_threads()
    pipeline.close()
    assert "gpipe-watch" in during
    return pipeline_threads()


def test_closed_pipeline_leaves_no_thread(four_ranks: Pool) -> None:
    assert four_ranks.run(threads_left, among=3) == [[], [], []]
