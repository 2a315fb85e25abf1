"""Promise: no hang. What a layer raises reaches the caller, and the next step is a sound one."""

import time
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_gpipe.core.pipeline import GPipe
from tests.core.faults import Fuse, OwnError, interrupt_the_caller, interruptible, throw, workers
from tests.core.models import assert_same, rows, step

SECOND = 1.0  # no fault may take longer to reach the caller
M = 4  # micro-batches, all of them recomputed; the fault is in micro-batch 1

# After how many calls of its forward, or of its backward, a layer meets micro-batch 1:
#
#   F0 F1 ...  and  R3 B3 R2 B2 R1 B1 R0 B0
FIRST_FORWARD, RECOMPUTE, BACKWARD = ("forward", 1), ("forward", M + 2), ("backward", 2)
VERBS = {FIRST_FORWARD: "forward", RECOMPUTE: "recompute", BACKWARD: "backward"}


@pytest.fixture
def plain() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) if k % 2 == 0 else Fuse() for k in range(6)]
    return nn.Sequential(*layers).double()


@pytest.fixture(params=[True, False], ids=["threads", "no threads"])
def pipeline(request: pytest.FixtureRequest, plain: nn.Sequential) -> Iterator[GPipe]:
    pipeline = GPipe(
        deepcopy(plain),
        [2, 2, 2],
        devices=["cpu"] * 3,
        chunks=M,
        activation_checkpointing="always",
        threads=request.param,
    )
    yield pipeline
    pipeline.close()


def light(pipeline: GPipe, stage: int, at: tuple[str, int], fault: Callable[[], None]) -> None:
    fuse = pipeline[2 * stage + 1]
    assert isinstance(fuse, Fuse)
    fuse.light(at, fault)


@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("at", VERBS, ids=VERBS.values())
@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt, SystemExit])
def test_error_in_a_layer(
    pipeline: GPipe,
    plain: nn.Sequential,
    error: type[BaseException],
    at: tuple[str, int],
    stage: int,
    warm: bool,
) -> None:
    if warm:
        step(pipeline, rows(7))
        pipeline.zero_grad()
    raised = error("by the layer")
    light(pipeline, stage, at, throw(raised))

    start = time.monotonic()
    with pytest.raises(error) as caught:
        step(pipeline, rows(7))

    assert time.monotonic() - start < SECOND
    assert caught.value is raised
    where = f"stage {stage} (layers {2 * stage}..{2 * stage + 1}, cpu)"
    assert raised.__notes__ == [f"raised in {VERBS[at]} of micro-batch 1 of {M} on {where}"]
    assert "in fault" in "".join(traceback.format_tb(raised.__traceback__))
    assert_same(step(pipeline, rows(7))._asdict(), step(plain, rows(7))._asdict())
    pipeline.close()
    assert workers() == []


def test_error_without_gradients(pipeline: GPipe, plain: nn.Sequential) -> None:
    light(pipeline, 1, FIRST_FORWARD, throw(OwnError()))

    with torch.no_grad(), pytest.raises(OwnError):
        pipeline(rows(7))

    assert torch.is_grad_enabled()
    assert_same(step(pipeline, rows(7))._asdict(), step(plain, rows(7))._asdict())


@pytest.mark.parametrize("at", [FIRST_FORWARD, BACKWARD], ids=["forward", "backward"])
def test_modules_are_as_they_were_after_an_error(pipeline: GPipe, at: tuple[str, int]) -> None:
    parameters = list(pipeline.parameters())
    light(pipeline, 1, at, throw(OwnError()))

    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)


def test_errors_of_two_stages_at_once(pipeline: GPipe, plain: nn.Sequential) -> None:
    for stage in range(3):
        light(pipeline, stage, FIRST_FORWARD, throw(OwnError(f"of stage {stage}")))

    with pytest.raises(OwnError, match="of stage"):
        step(pipeline, rows(7))

    for stage in range(3):
        light(pipeline, stage, FIRST_FORWARD, lambda: None)
    assert_same(step(pipeline, rows(7))._asdict(), step(plain, rows(7))._asdict())


def test_error_after_error(pipeline: GPipe, plain: nn.Sequential) -> None:
    for at in (BACKWARD, FIRST_FORWARD, RECOMPUTE) * 2:
        light(pipeline, 1, at, throw(OwnError()))
        with pytest.raises(OwnError):
            step(pipeline, rows(7))

    assert_same(step(pipeline, rows(7))._asdict(), step(plain, rows(7))._asdict())


def test_layer_that_fails_while_another_is_in_the_middle_of_its_work(pipeline: GPipe) -> None:
    light(pipeline, 0, ("forward", 2), lambda: time.sleep(2 if pipeline._threads else 0))
    light(pipeline, 1, FIRST_FORWARD, throw(OwnError()))

    start = time.monotonic()
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert time.monotonic() - start < SECOND


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("at", VERBS, ids=VERBS.values())
def test_caller_is_interrupted(
    pipeline: GPipe, plain: nn.Sequential, at: tuple[str, int], stage: int
) -> None:
    light(pipeline, stage, at, interrupt_the_caller)

    start = time.monotonic()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        step(pipeline, rows(7))

    assert time.monotonic() - start < SECOND
    assert_same(step(pipeline, rows(7))._asdict(), step(plain, rows(7))._asdict())
    pipeline.close()
    assert workers() == []


def test_step_right_after_an_error_while_another_layer_was_busy(plain: nn.Sequential) -> None:
    """0.1: the next step took the shadows that the busy layer ran with for parameters."""
    pipeline = GPipe(deepcopy(plain), [2, 2, 2], devices=["cpu"] * 3, chunks=M)
    parameters = list(pipeline.parameters())
    light(pipeline, 0, ("forward", 2), lambda: time.sleep(1.5))
    light(pipeline, 1, FIRST_FORWARD, throw(OwnError()))
    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    again = step(pipeline, rows(7))

    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    assert_same(again._asdict(), step(plain, rows(7))._asdict())
    pipeline.close()
