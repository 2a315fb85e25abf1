"""No hang: an error in a layer reaches the caller, and the next step is correct."""

import threading
import traceback
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.transport import local
from lightning_gpipe.core.transport.threads import Outcomes
from tests.support.faults import (
    Busy,
    Fuse,
    OwnError,
    interrupt_the_caller,
    interruptible,
    no_time_out,
    throw,
)
from tests.support.models import assert_same, assert_same_step, gradients, rows, step
from tests.support.pipes import Pipe, with_and_without_threads
from tests.support.process import workers
from tests.support.waiting import PATIENCE

M = 4  # micro-batches, all of them recomputed; the fault is in micro-batch 1

# After how many calls of its forward, or of its backward, a layer meets micro-batch 1:
#
#   F0 F1 ...  and  R3 B3 R2 B2 R1 B1 R0 B0
FIRST_FORWARD, RECOMPUTE, BACKWARD = ("forward", 1), ("forward", M + 2), ("backward", 2)
VERBS = {FIRST_FORWARD: "forward", RECOMPUTE: "recompute", BACKWARD: "backward"}


@pytest.fixture(autouse=True)
def _no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time_out(monkeypatch)
    monkeypatch.setattr(local, "GRACE", PATIENCE)


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a caller wait but shortly for a layer at work: there is one that does not end."""
    monkeypatch.setattr(local, "GRACE", 0.05)


@pytest.fixture
def plain() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) if k % 2 == 0 else Fuse() for k in range(6)]
    return nn.Sequential(*layers).double()


@pytest.fixture
def pipeline(pipe: Pipe, plain: nn.Sequential) -> GPipe:
    return pipe(plain, stages=3, chunks=M, mode="always")


def light(pipeline: GPipe, stage: int, at: tuple[str, int], fault: Callable[[], None]) -> None:
    light_in(pipeline[2 * stage + 1], at, fault)


def light_in(layer: nn.Module, at: tuple[str, int], fault: Callable[[], None]) -> None:
    (fuse,) = (module for module in layer.modules() if isinstance(module, Fuse))
    fuse.light(at, fault)


@with_and_without_threads
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

    with pytest.raises(error) as caught:
        step(pipeline, rows(7))

    assert caught.value is raised
    fuse = f"{2 * stage + 1}"
    where = f"stage {stage} (layers {2 * stage}.0..{fuse}, cpu), in layer {fuse} (Fuse)"
    assert raised.__notes__ == [f"raised in {VERBS[at]} of micro-batch 1 of {M} on {where}"]
    assert "in fault" in "".join(traceback.format_tb(raised.__traceback__))
    assert_same_step(pipeline, plain, rows(7))
    pipeline.close()
    assert workers() == []


@with_and_without_threads
def test_error_without_gradients(pipeline: GPipe, plain: nn.Sequential) -> None:
    light(pipeline, 1, FIRST_FORWARD, throw(OwnError()))

    with torch.no_grad(), pytest.raises(OwnError):
        pipeline(rows(7))

    assert torch.is_grad_enabled()
    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
@pytest.mark.parametrize("at", [FIRST_FORWARD, BACKWARD], ids=["forward", "backward"])
def test_modules_are_as_they_were_after_an_error(pipeline: GPipe, at: tuple[str, int]) -> None:
    parameters = list(pipeline.parameters())
    light(pipeline, 1, at, throw(OwnError()))

    with pytest.raises(OwnError):
        step(pipeline, rows(7))

    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in parameters)


@with_and_without_threads
def test_errors_of_two_stages_at_once(pipeline: GPipe, plain: nn.Sequential) -> None:
    for stage in range(3):
        light(pipeline, stage, FIRST_FORWARD, throw(OwnError(f"of stage {stage}")))

    with pytest.raises(OwnError, match="of stage"):
        step(pipeline, rows(7))

    for stage in range(3):
        light(pipeline, stage, FIRST_FORWARD, lambda: None)
    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
def test_error_after_error(pipeline: GPipe, plain: nn.Sequential) -> None:
    for at in (BACKWARD, FIRST_FORWARD, RECOMPUTE) * 2:
        light(pipeline, 1, at, throw(OwnError()))
        with pytest.raises(OwnError):
            step(pipeline, rows(7))

    assert_same_step(pipeline, plain, rows(7))


# Where stage 0 is busy when another stage fails, and when that one does: once it is.
WHILE_BUSY = {
    "forward": (("forward", 2), 1, FIRST_FORWARD),
    "recompute": (("forward", M), 2, ("backward", 0)),
    "backward": (("backward", 0), 1, ("backward", 1)),
}


def wait_and_throw(busy: Busy, error: BaseException) -> None:
    assert busy.begun.wait(PATIENCE)
    raise error


def fail_while_another_layer_is_busy(pipeline: GPipe, during: str = "forward") -> Busy:
    """Let a stage fail in the middle of what stage 0 does, and see that the caller is told then."""
    busy = Busy()

    at, stage, then = WHILE_BUSY[during]
    light(pipeline, 0, at, busy)
    light(pipeline, stage, then, partial(wait_and_throw, busy, OwnError()))
    with pytest.raises(OwnError):
        step(pipeline, rows(7))
    assert not busy.over
    return busy


@pytest.mark.usefixtures("_short_grace")
def test_layer_that_fails_while_another_is_in_the_middle_of_its_work(
    pipeline: GPipe, plain: nn.Sequential
) -> None:
    busy = fail_while_another_layer_is_busy(pipeline)

    busy.end()
    assert_same_step(pipeline, plain, rows(7))


@with_and_without_threads
@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("at", VERBS, ids=VERBS.values())
def test_caller_is_interrupted(
    pipeline: GPipe,
    plain: nn.Sequential,
    at: tuple[str, int],
    stage: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An interrupt that strikes just before the caller begins to wait is seen when it looks up.
    monkeypatch.setattr(local, "POLL", 0.05)
    busy = Busy()  # without threads it is the caller's layer, whose work the interrupt ends
    light(pipeline, stage, at, partial(interrupt_the_caller, busy))

    with interruptible(), pytest.raises(KeyboardInterrupt):
        step(pipeline, rows(7))

    assert not busy.over
    busy.end()
    assert_same_step(pipeline, plain, rows(7))
    pipeline.close()
    assert workers() == []


@pytest.mark.usefixtures("_short_grace")
def test_step_right_after_an_error_while_another_layer_was_busy(
    pipeline: GPipe, plain: nn.Sequential
) -> None:
    """Once the next step took the busy layer's shadow parameters for the real ones."""
    parameters = list(pipeline.parameters())
    busy = fail_while_another_layer_is_busy(pipeline)

    threading.Timer(0.1, busy.end).start()  # by then the next step has begun
    again = step(pipeline, rows(7))

    assert busy.over
    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    assert_same(again._asdict(), step(plain, rows(7))._asdict())


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize("during", WHILE_BUSY)
def test_optimizer_made_after_an_error_while_another_layer_is_busy(
    pipeline: GPipe, plain: nn.Sequential, during: str
) -> None:
    """Once it got shadow parameters, and trained nothing."""
    own = list(pipeline.parameters())
    busy = fail_while_another_layer_is_busy(pipeline, during)

    found = list(pipeline.parameters())
    assert not busy.over
    assert all(one is two for one, two in zip(found, own, strict=True))
    optimizer = torch.optim.SGD(found, lr=0.1)
    busy.end()
    pipeline.zero_grad()
    assert_same_step(pipeline, plain, rows(7))
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(dict(pipeline.named_parameters()), dict(plain.named_parameters()))


class Remembering(nn.Sequential):
    """A linear layer, a fuse, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3).double(), Fuse())
        self.calls: Tensor = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.usefixtures("_short_grace")
def test_modules_are_as_they_were_while_a_layer_is_busy_in_recomputation(pipe: Pipe) -> None:
    """Once the buffers of a recomputation, and its training mode, stayed until the next step."""
    pipeline = pipe(nn.Sequential(*(Remembering() for _ in range(3))), chunks=M, mode="always")
    first = pipeline[0]
    assert isinstance(first, Remembering)
    calls, busy = first.calls, Busy()

    loss = pipeline(rows(7)).sum()
    pipeline.eval()
    light_in(first, ("forward", 0), busy)
    light_in(pipeline[2], ("backward", 0), partial(wait_and_throw, busy, OwnError()))
    with pytest.raises(OwnError):
        loss.backward()

    assert not busy.over
    assert first.calls is calls
    assert not any(module.training for module in pipeline.modules())
    busy.end()


@pytest.mark.usefixtures("_short_grace")
def test_busy_layer_changes_nothing_once_the_error_was_raised(pipeline: GPipe) -> None:
    own = dict(pipeline.named_parameters())
    busy = fail_while_another_layer_is_busy(pipeline)

    busy.end()
    pipeline.close()

    assert workers() == []
    assert all(each is own[name] for name, each in pipeline.named_parameters())


@pytest.mark.usefixtures("_short_grace")
def test_backward_of_an_earlier_forward_after_an_error_while_a_layer_was_busy(
    pipeline: GPipe, plain: nn.Sequential
) -> None:
    loss = pipeline(rows(7)).exp().sum()
    busy = fail_while_another_layer_is_busy(pipeline)
    busy.end()

    loss.backward()

    plain(rows(7)).exp().sum().backward()
    assert_same(gradients(pipeline), gradients(plain))


@pytest.mark.usefixtures("_short_grace")
def test_second_interrupt_while_the_caller_waits_for_a_busy_layer(
    pipeline: GPipe, plain: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(pipeline, rows(7))
    pipeline.zero_grad()
    own, busy = dict(pipeline.named_parameters()), Busy()

    def interrupt(outcomes: Outcomes, timeout: float) -> None:
        raise KeyboardInterrupt("second")

    light(pipeline, 0, FIRST_FORWARD, busy)
    light(pipeline, 1, ("forward", 0), partial(wait_and_throw, busy, KeyboardInterrupt("first")))
    with monkeypatch.context() as patch:
        patch.setattr(Outcomes, "wait_for_all", interrupt)
        with pytest.raises(KeyboardInterrupt, match="second"):
            step(pipeline, rows(7))

    assert all(each is own[name] for name, each in pipeline.named_parameters())
    busy.end()
    assert_same_step(pipeline, plain, rows(7))
