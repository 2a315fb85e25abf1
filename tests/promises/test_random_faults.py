"""No hang: any action may fail at any time; 150 drawn faults, 2,500 in a soak.

test_faults.py tests the possible faults one by one. Here the pipeline, the action that fails, the
kind of failure and the step are drawn together.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from lightning_gpipe.core.transport import local
from lightning_gpipe.core.transport.threads import Job, Outcomes
from tests.support.faults import (
    Fuse,
    OwnError,
    interrupt_the_caller,
    interruptible,
    no_time_out,
    nothing,
    throw,
)
from tests.support.models import assert_same, rows, step
from tests.support.process import workers

RAISED: dict[str, type[BaseException]] = {
    "error": OwnError,
    "keyboard interrupt": KeyboardInterrupt,
    "exit": SystemExit,
}
SORTS = [*RAISED, "caller interrupted", "thread lost"]
GRACE = 0.005  # seconds that a caller waits for a layer at work; some take longer


class Lost(SystemExit):
    """Ends the thread that raises it, which reports nothing."""


class Fault(NamedTuple):
    """What fails: an action ``kind`` (F, R or B) of micro-batch i of m on stage j of n."""

    sort: str
    kind: str
    i: int
    m: int
    j: int
    n: int
    devices: int
    mode: ActivationCheckpointing
    threads: bool
    steps_before: int
    work: float  # seconds that the layer works on after the caller was interrupted

    @property
    def at(self) -> tuple[str, int]:
        """Which of its calls brings the action to stage j.

        Its forwards are F0 .. F(m-1) and, from the last down to R0, those that are recomputed.
        """
        m, recomputed = self.m, count_recomputed(self.mode, self.m)
        match self.kind:
            case "F":
                return "forward", self.i
            case "R":
                return "forward", m + recomputed - 1 - self.i
            case _:
                return "backward", m - 1 - self.i

    @property
    def note(self) -> str:
        verb = {"F": "forward", "R": "recompute", "B": "backward"}[self.kind]
        fuse = f"{2 * self.j + 1}"
        stage = f"stage {self.j} (layers {2 * self.j}.0..{fuse}, cpu), in layer {fuse} (Fuse)"
        return f"raised in {verb} of micro-batch {self.i} of {self.m} on {stage}"


def count_recomputed(mode: ActivationCheckpointing, m: int) -> int:
    return {"always": m, "except_last": m - 1, "never": 0, 2: min(2, m)}[mode]


def drawn(generator: random.Random) -> Fault:
    draw = generator.choice
    m, n = draw(range(1, 6)), draw([2, 3, 4])
    devices = n if generator.random() < 0.7 else draw([d for d in (1, 2, 3) if n % d == 0])
    threads = devices > 1 and generator.random() < 0.9
    mode: ActivationCheckpointing = draw(["always", "except_last", "never", 2])
    recomputed = count_recomputed(mode, m)
    kind = draw("FRB" if recomputed else "FB")
    return Fault(
        sort=draw(SORTS if threads else SORTS[:-1]),
        kind=kind,
        i=draw(range(recomputed if kind == "R" else m)),
        m=m,
        j=draw(range(n)),
        n=n,
        devices=devices,
        mode=mode,
        threads=threads,
        steps_before=draw([0, 0, 1, 2]),
        work=generator.uniform(0.0, 2 * GRACE),
    )


@contextmanager
def unreported_losses() -> Iterator[None]:
    """Lets :class:`Lost` end a worker's thread unreported, as nothing in Python really does.

    The caller, whom nobody wakes, looks up soon.
    """
    reporting = Outcomes.of

    def of(outcomes: Outcomes, job: Job) -> Job:
        def run() -> None:
            end = nothing
            try:
                job()
            except Lost:
                raise
            except BaseException as error:
                end = throw(error)
            reporting(outcomes, end)()

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcomes, "of", of)
        patch.setattr(local, "POLL", GRACE)
        yield


def modules(n: int) -> nn.Sequential:
    """Stages of two layers, the second one a fuse."""
    halves = [(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), Fuse()) for _ in range(n)]
    return nn.Sequential(*(layer for half in halves for layer in half)).double()


def survive(fault: Fault) -> None:
    """Let a pipeline fail, see what comes of it, and use it again."""
    plain = modules(fault.n)
    pipeline = GPipe(
        deepcopy(plain),
        [2] * fault.n,
        devices=["cpu"] * fault.devices,
        chunks=fault.m,
        activation_checkpointing=fault.mode,
        threads=fault.threads,
    )
    batch = rows(fault.m + 2)  # of 1 to 3 rows each
    others, parameters = set(workers()), list(pipeline.parameters())
    for _ in range(fault.steps_before):
        step(pipeline, batch)
        pipeline.zero_grad()

    fail(pipeline, fault, batch)
    # Not those in the layers: one that is still at work has stand-ins for them until the next step.
    assert all(parameter.grad is None for parameter in parameters)
    again = step(pipeline, batch)

    assert all(one is two for one, two in zip(pipeline.parameters(), parameters, strict=True))
    assert_same(again._asdict(), step(plain, batch)._asdict())
    pipeline.close()
    assert set(workers()) <= others


def fail(pipeline: GPipe, fault: Fault, batch: Tensor) -> None:
    """Let the drawn action fail in a step, which must raise what it should."""
    fuse = pipeline[2 * fault.j + 1]
    assert isinstance(fuse, Fuse)
    if fault.sort == "caller interrupted":
        fuse.light(fault.at, partial(interrupt_the_caller, partial(time.sleep, fault.work)))
        with interruptible(), pytest.raises(KeyboardInterrupt) as interrupt:
            step(pipeline, batch)
        # On a thread of its own the layer does not notice.
        assert getattr(interrupt.value, "__notes__", []) == ([] if fault.threads else [fault.note])
    elif fault.sort == "thread lost":
        worker = fault.j % fault.devices
        fuse.light(fault.at, throw(Lost()))
        with (
            unreported_losses(),
            pytest.raises(RuntimeError, match=rf"thread of worker {worker} \(cpu\) must live"),
        ):
            step(pipeline, batch)
    else:
        raised = RAISED[fault.sort]("by the layer")
        fuse.light(fault.at, throw(raised))
        with pytest.raises(type(raised)) as caught:
            step(pipeline, batch)
        assert caught.value is raised
        assert raised.__notes__ == [fault.note]


@pytest.fixture(autouse=True)
def _no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time_out(monkeypatch)
    monkeypatch.setattr(local, "GRACE", GRACE)


# What a thread ends with, here Lost.
reported_by_pytest = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


@reported_by_pytest
@pytest.mark.parametrize("seed", range(10))
def test_drawn_faults(seed: int) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(settings().max_examples // 8):
        fault = drawn(generator)
        try:
            survive(fault)
        except BaseException as error:
            error.add_note(f"after {fault}")
            raise


@reported_by_pytest
@pytest.mark.parametrize("kind", "FRB")
def test_thread_lost_in_the_middle_of_a_run(kind: str) -> None:
    survive(Fault("thread lost", kind, 1, 4, 1, 3, 3, "always", True, 0, 0.0))
