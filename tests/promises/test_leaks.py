"""Cost: a step frees its memory as soon as possible, and nothing accumulates."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import collect_loss_terms
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.faults import Fuse, OwnError, throw
from tests.support.meters import (
    ACTIVATIONS,
    BOUNDARY,
    KEPT,
    Meter,
    N,
    census,
    microbatches,
    run,
    saving,
    settled,
    watch,
    wide,
)
from tests.support.models import Call, Fork, Join, Through, perceptron, rows
from tests.support.pipes import Pipe, every_mode, with_and_without_threads
from tests.support.process import workers
from tests.support.waiting import awaited

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


# Between forward and backward.


class Watch(nn.Module):
    """Remembers weakly what went through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen.append(weakref.ref(y))
        return y.sin()  # which saves y

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)


def watching(pipe: Pipe) -> tuple[GPipe, Watch]:
    watch = Watch()
    module = nn.Sequential(*perceptron(2), watch, nn.Tanh())
    return pipe(module, [1, 3], copy=False), watch


class Weight(nn.Linear):
    """Remembers weakly with which weights it ran."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weights: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.weights.append(weakref.ref(self.weight))
        return super().forward(x)


@pytest.mark.usefixtures("no_collector")
@every_mode
@with_and_without_threads
def test_weights_that_autocast_has_cached(pipe: Pipe) -> None:
    """The cache has a copy of each weight in low precision, until the end of autocast."""
    layer = Weight()
    pipeline = pipe(nn.Sequential(nn.Linear(3, 3), layer), [1, 1], copy=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            pipeline(rows(7).float()).sum().backward()
        alive = {id(weight) for each in layer.weights if (weight := each()) is not None}
        assert alive <= {id(layer.weight)}


@pytest.mark.usefixtures("no_collector")
@every_mode
@with_and_without_threads
def test_weights_that_autocast_has_cached_in_steps(pipe: Pipe) -> None:
    layer = Weight()
    pipeline = pipe(nn.Sequential(nn.Linear(3, 3), layer), [1, 1], copy=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            loss = pipeline.by_micro_batch(lambda x: pipeline(x).sum(), rows(7).float()).loss
            assert loss is not None
            loss.backward()
            del loss
        alive = {id(weight) for each in layer.weights if (weight := each()) is not None}
        assert alive <= {id(layer.weight)}


@pytest.mark.usefixtures("no_collector")
@every_mode
def test_forward_without_gradients_keeps_nothing(pipe: Pipe) -> None:
    pipeline, watch = watching(pipe)

    with torch.no_grad():
        y = pipeline(rows(7))

    assert watch.alive == 0
    assert y.shape == (7, 3)


def test_backward_that_fails_frees_the_activations(pipe: Pipe) -> None:
    watch = Watch()
    module = nn.Sequential(watch, nn.Linear(3, 3).double())
    pipeline = pipe(module, devices=1, mode="never", copy=False)
    module[1].register_full_backward_hook(lambda *_: 1 / 0)
    loss = pipeline(rows(7)).sum()
    assert watch.alive == 3

    with pytest.raises(ZeroDivisionError) as caught:
        loss.backward()
    gc.collect()

    assert caught.traceback and watch.alive <= 1, "the error holds at most what it came from"
    del caught
    gc.collect()
    assert watch.alive == 0
    assert loss.requires_grad


@with_and_without_threads
def test_step_that_fails_frees_the_activations(pipe: Pipe) -> None:
    """With a loss for each micro-batch, before the last of them begins."""
    before, watch = Watch(), Watch()
    pipeline = pipe(nn.Sequential(watch, nn.Linear(3, 3).double()), mode="never", copy=False)
    alive: list[int] = []

    def step(x: Tensor) -> Tensor:
        if alive:
            raise OwnError
        loss = pipeline(before(x)).sum()
        alive.append(watch.alive)
        return loss

    with pytest.raises(OwnError) as caught:
        pipeline.by_micro_batch(step, rows(7))
    gc.collect()

    assert caught.traceback and alive[0] > 0 and watch.alive == 0
    assert before.alive <= 1, "its traceback has the call of the first micro-batch"


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
def test_graph_of_what_a_step_returns_beside_its_loss(pipe: Pipe) -> None:
    """It is freed before the backward of the loss."""
    pipeline, watch, alive = pipe(perceptron(), mode="never"), Watch(), []

    def step(x: Tensor) -> dict[str, Tensor]:
        y = pipeline(x)
        y.register_hook(lambda _: alive.append(watch.alive))
        return {"loss": y.mean(), "other": watch(y)}

    pipeline.by_micro_batch(step, rows(7))

    assert alive == [0, 0, 0]


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
def test_value_that_a_step_has_kept_on_a_layer(pipe: Pipe) -> None:
    pipeline = pipe(perceptron(), mode="never")
    seen: list[weakref.ref[Tensor]] = []

    def step(x: Tensor) -> Tensor:
        scale = torch.ones(3)
        seen.append(weakref.ref(scale))
        pipeline[0].scale = scale
        return pipeline(x).mean()

    pipeline.by_micro_batch(step, rows(7))
    del pipeline[0].scale

    assert len(seen) == 3 and not any(reference() is not None for reference in seen)


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
def test_input_is_not_kept_by_the_output(pipe: Pipe) -> None:
    pipeline, x = pipe(perceptron()), rows(7).detach()
    alive = weakref.ref(x)

    y = pipeline(x)
    y.sum().backward()
    del x

    assert alive() is None


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
def test_steps_do_not_add_up_in_memory(pipe: Pipe) -> None:
    pipeline, counts = pipe(perceptron()), []
    for _ in range(30):
        pipeline(rows(7)).sum().backward()
        counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    assert counts[-1] == counts[2]


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
@pytest.mark.parametrize("mode", KEPT)
def test_forward_without_a_backward_frees_all_when_its_outputs_go(
    mode: ActivationCheckpointing, pipe: Pipe
) -> None:
    module = nn.Sequential(*wide(2), Call(lambda x: (x.sin(), {"other": x.cos()})))
    pipeline = pipe(module, [3, 4], chunks=4)
    meter = Meter()
    watch(meter, pipeline)
    sine, rest = pipeline(microbatches(4))
    del sine
    assert meter.now >= KEPT[mode](4) * 2 * ACTIVATIONS + 4 * BOUNDARY

    del rest

    assert settled(meter, 0) == 0


@pytest.mark.usefixtures("no_collector")
@with_and_without_threads
@pytest.mark.parametrize("mode", KEPT)
def test_output_kept_after_backward_keeps_no_activations(pipe: Pipe) -> None:
    pipeline = pipe(wide(), stages=N, chunks=4)
    meter = Meter()
    watch(meter, pipeline)

    y = pipeline(microbatches(4))
    y.sum().backward()

    assert settled(meter, 0) == 0
    assert y.grad_fn is not None


@with_and_without_threads
def test_hooks_that_keep_what_autograd_saves(pipe: Pipe) -> None:
    """Once they also got what a dropped forward saves, without threads, and kept it for ever."""
    pipeline = pipe(wide(), stages=N, chunks=4, mode="always")
    meter = Meter()
    watch(meter, pipeline)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = pipeline(microbatches(4))
    y.sum().backward()
    del y

    gc.collect()
    assert settled(meter, 0) == 0


# After the step.


def all_sorts() -> nn.Sequential:
    """Tensors drawn, buffers that change, trees that pass from stage to stage, and a fuse."""
    drawing = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), Fork(3)]
    passing = [Through(nn.Linear(3, 3)), Through(Fuse()), Through(nn.Dropout())]
    return nn.Sequential(*drawing, *passing, Join(), nn.Linear(3, 3), nn.Tanh()).double()


@pytest.mark.parametrize("workers", [1, N])
def test_output_kept_after_backward_keeps_nothing(workers: int, pipe: Pipe) -> None:
    """Once it kept the moments of batch norms and generator states of all micro-batches alive."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Dropout()).double()
    pipeline = pipe(module, stages=N, devices=workers, chunks=4, mode="never")
    x = rows(8)
    run(pipeline, x)
    _, before = census()

    y = pipeline(x)
    y.square().sum().backward()
    pipeline.zero_grad()
    x.grad = None

    assert awaited(lambda: census()[1] - before, y.nbytes) == y.nbytes


@with_and_without_threads
def test_output_kept_after_backward_does_not_keep_the_pipeline(threads: bool) -> None:
    """Once it kept its stages, and threads that nobody could end any more."""
    pipeline = GPipe(perceptron(), [2, 2], devices=["cpu"] * 2, threads=threads)
    engine = weakref.ref(pipeline.engine)
    stage = weakref.ref(pipeline.stages[0])

    y = pipeline(rows(7))
    y.sum().backward()
    del pipeline
    gc.collect()

    assert y.grad_fn is not None
    assert (engine(), stage()) == (None, None)
    assert awaited(lambda: len(workers()), 0) == 0


def test_dropped_pipeline_needs_no_collector() -> None:
    """A front-end that held what runs its programs once kept engine and threads in a cycle."""
    pipeline = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu"])
    pipeline(torch.ones(2, 4)).sum().backward()
    stage = weakref.ref(pipeline.stages[0])
    gc.collect()
    gc.disable()
    try:
        del pipeline
        assert stage() is None
    finally:
        gc.enable()


def train(pipeline: GPipe) -> None:
    run(pipeline, rows(7))


def train_and_look(pipeline: GPipe) -> None:
    with torch.no_grad():
        pipeline(rows(6))
    with torch.inference_mode():
        pipeline(rows(9))
    train(pipeline)


def train_between_forwards(pipeline: GPipe) -> None:
    kept = pipeline(rows(7))
    train(pipeline)
    del kept
    pipeline(rows(6))


FOUND: ContextVar[dict[str, list[Tensor]]] = ContextVar("FOUND")


def look_into_a_variable(pipeline: GPipe) -> None:
    """Python's collector does not see autograd's graph, through which results lead to a pipeline.

    Once mini-batches kept the variables of their caller, and so their own results in them.
    """
    token = FOUND.set({"outputs": []})
    FOUND.get()["outputs"].append(pipeline(rows(7)))
    FOUND.reset(token)
    with collect_loss_terms() as terms:
        terms["of the caller"] = pipeline(rows(7)).sum()


def fail(pipeline: GPipe, kind: str) -> None:
    through = pipeline[5]
    assert isinstance(through, Through) and isinstance(through.layer, Fuse)
    through.layer.light((kind, 1), throw(OwnError()))
    with suppress(OwnError):
        train(pipeline)
    assert through.layer.spark.at is None
    train(pipeline)


USES: dict[str, Callable[[GPipe], None]] = {
    "steps": train,
    "forwards without gradients": train_and_look,
    "forwards without a backward": train_between_forwards,
    "results in a variable of the context": look_into_a_variable,
    "errors in forward": lambda pipeline: fail(pipeline, "forward"),
    "errors in backward": lambda pipeline: fail(pipeline, "backward"),
}


@with_and_without_threads
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_is_left(use: Callable[[GPipe], None], pipe: Pipe) -> None:
    pipeline = pipe(all_sorts(), [4, 3, 3])
    meter = Meter()
    watch(meter, pipeline)
    before = census()

    for _ in range(20):
        with saving(meter, pipeline):
            use(pipeline)

    assert awaited(census, before) == before
    assert settled(meter, 0) == 0
