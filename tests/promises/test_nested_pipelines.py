"""No hang: a layer may contain another pipeline, but not run its own.

Both pipelines may run on threads or on the calling thread, and whichever is nested runs on a thread
of the other.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.models import Call, assert_same, assert_same_steps, perceptron, rows
from tests.support.pipes import MODES, Pipe, every_mode
from tests.support.waiting import PATIENCE

every_combination = pytest.mark.parametrize(
    "outer, inner",
    [(True, True), (True, False), (False, True), (False, False)],
    ids=["both on threads", "inner on its caller's", "outer on its caller's", "no threads"],
)


def nested(pipe: Pipe, plain: nn.Sequential, *, outer: bool, inner: bool, at: int = 1) -> GPipe:
    """A pipeline of a copy of ``plain``, whose layer ``at`` is a pipeline."""
    layers = copy.deepcopy(plain)
    contained = layers[at]
    assert isinstance(contained, nn.Sequential)
    layers[at] = pipe(contained, threads=inner, copy=False, chunks=2)
    return pipe(layers, threads=outer, copy=False)


def layers() -> nn.Sequential:
    return nn.Sequential(*perceptron(1), nn.Sequential(*perceptron(4)), *perceptron(3))


def in_time(run: object) -> None:
    """Run on a thread, and see that it ends."""
    assert callable(run)
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    for error in errors:
        raise error


@every_combination
@every_mode
def test_pipeline_in_a_layer(pipe: Pipe, outer: bool, inner: bool) -> None:
    plain = layers()
    pipeline = nested(pipe, plain, outer=outer, inner=inner)
    own = list(pipeline.parameters())

    in_time(lambda: assert_same_steps(pipeline, plain, [rows(12, seed=s) for s in range(3)]))

    assert all(one is two for one, two in zip(pipeline.parameters(), own, strict=True))


@every_combination
@pytest.mark.parametrize("inner_mode", MODES, ids=str)
def test_modes_of_both(
    pipe: Pipe, outer: bool, inner: bool, inner_mode: ActivationCheckpointing
) -> None:
    plain = layers()
    piped = copy.deepcopy(plain)
    contained = piped[1]
    assert isinstance(contained, nn.Sequential)
    piped[1] = pipe(contained, threads=inner, copy=False, mode=inner_mode)
    pipeline = pipe(piped, threads=outer, copy=False, mode="always")

    in_time(lambda: assert_same_steps(pipeline, plain, [rows(12, seed=s) for s in range(2)]))


@every_combination
def test_without_gradients(pipe: Pipe, outer: bool, inner: bool) -> None:
    plain = layers()
    pipeline = nested(pipe, plain, outer=outer, inner=inner)

    def run() -> None:
        with torch.inference_mode():
            assert_same(pipeline(rows(12)), plain(rows(12)))

    in_time(run)


@every_combination
@every_mode
def test_running_statistics(pipe: Pipe, outer: bool, inner: bool) -> None:
    """Once they were updated for each micro-batch of the inner pipeline."""
    normed = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    plain = nn.Sequential(*perceptron(2), normed, nn.Tanh())
    pipeline = nested(pipe, plain, outer=outer, inner=inner, at=2)

    def run() -> None:
        for seed in range(2):
            pipeline(rows(12, seed=seed)).sum().backward()
            plain(rows(12, seed=seed))

    in_time(run)

    assert_same(dict(pipeline.named_buffers()), dict(plain.named_buffers()))


class Holder:
    """Calls a pipeline that is made later."""

    pipeline: GPipe

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.pipeline(x)
        return y


@pytest.mark.parametrize(
    "options",
    [{"threads": True}, {"threads": False}, {"devices": 1}],
    ids=["threads", "no threads", "one device"],
)
@every_mode
def test_layer_that_runs_its_own_pipeline(pipe: Pipe, options: dict[str, Any]) -> None:
    """Once the inner run took the shadows of the outer one away, where both were inline."""
    holder = Holder()
    again = Call(holder)
    plain = nn.Sequential(*perceptron(2), again, *perceptron(2))
    holder.pipeline = pipe(plain, copy=False, **options)
    parameters = list(plain.parameters())

    with pytest.raises(RuntimeError, match="must not run the pipeline that it is part of"):
        in_time(lambda: holder.pipeline(rows(7)))

    assert all(one is two for one, two in zip(plain.parameters(), parameters, strict=True))
    again.function = torch.tanh
    in_time(lambda: assert_same_steps(holder.pipeline, copy.deepcopy(plain), [rows(7)]))


@every_combination
def test_pipeline_in_a_layer_that_runs_the_outer_one(pipe: Pipe, outer: bool, inner: bool) -> None:
    """Once the inner one's worker waited for the outer one's caller, which waited for it."""
    holder = Holder()
    own = nn.Sequential(*perceptron(2), Call(holder))
    plain = nn.Sequential(*perceptron(1), pipe(own, threads=inner, copy=False), *perceptron(2))
    holder.pipeline = pipe(plain, copy=False, threads=outer)
    parameters = list(plain.parameters())

    with pytest.raises(RuntimeError, match="must not run the pipeline that it is part of"):
        in_time(lambda: holder.pipeline(rows(7)))

    assert all(one is two for one, two in zip(plain.parameters(), parameters, strict=True))


@every_combination
def test_one_pipeline_that_layers_on_two_stages_run(pipe: Pipe, outer: bool, inner: bool) -> None:
    """It is no module of theirs, so its own layers keep their parameters: they take turns."""
    helper = nn.Sequential(*perceptron(2))
    own = pipe(helper, threads=inner)

    def ends(run: nn.Module) -> list[nn.Module]:
        return [Call(lambda x: run(x)), nn.Tanh(), Call(lambda x: run(x)), nn.Tanh()]

    plain = nn.Sequential(*ends(helper))
    pipeline = pipe(nn.Sequential(*ends(own)), threads=outer, chunks=4, copy=False, mode="never")

    in_time(lambda: assert_same_steps(pipeline, plain, [rows(12, seed=s) for s in range(3)]))
