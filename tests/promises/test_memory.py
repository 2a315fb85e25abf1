"""Promise: recomputation bounds memory by one micro-batch, and what a step took it gives back.

Of a micro-batch that is recomputed a stage keeps its input, a *boundary*. What else it keeps, here
100 times as much, are its activations. Both are measured in two ways: by what autograd saves, and
by what is allocated and not freed yet. Micro-batches have a fixed size: a batch grows with their
number m.
"""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.plan.recompute import Mode
from tests.support.faults import Fuse, OwnError, throw
from tests.support.models import Call, Fork, Join, Through, rows
from tests.support.waiting import awaited

R, W, K, N = 4, 2, 100, 3  # rows of a micro-batch, width of a boundary, how much wider, stages
BOUNDARY = R * W * 8  # bytes, of one micro-batch at one stage
ACTIVATIONS = K * BOUNDARY

# How many of m micro-batches keep their activations from forward to backward.
KEPT: dict[Mode, Callable[[int], int]] = {
    "always": lambda m: 0,
    "except_last": lambda m: 1,
    "never": lambda m: m,
    2: lambda m: max(0, m - 2),
    30: lambda m: max(0, m - 30),
}
ALL, SOME = range(1, 33), (1, 2, 3, 8, 31, 32)  # m


class Meter:
    """So many bytes now, and the most there were at once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders = Counter[int]()
        self._lock = threading.RLock()  # a holder may die in the middle of another's hold

    def hold(self, key: int, size: int, holder: object) -> None:
        """Count ``size`` bytes, once for all holders of the same ``key``, until the last dies."""
        with self._lock:
            if not self._holders[key]:
                self.now += size
                self.peak = max(self.peak, self.now)
            self._holders[key] += 1
        weakref.finalize(holder, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                self.now -= size

    def hold_storages(self, tree: Any, but: Collection[int] = ()) -> None:
        """Count the memory of all tensors in ``tree``, except scalars and the storages ``but``."""
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and x.dim() > 0:
                storage = x.untyped_storage()
                if storage._cdata not in but:
                    self.hold(storage._cdata, storage.nbytes(), storage)


class _Packed:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # its graph would refer to it for ever


def saving(meter: Meter, module: nn.Module) -> AbstractContextManager[None]:
    """Meters what a forward saves for backward, apart from parameters."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}

    def pack(x: Tensor) -> _Packed:
        packed = _Packed(x)
        if x.data_ptr() not in parameters:
            meter.hold(x.data_ptr(), x.nbytes, packed)
        return packed

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor)


class Allocating(TorchDispatchMode):
    """Meters all that operators allocate; makes the pipeline run on the calling thread."""

    def __init__(self, meter: Meter, but: list[Tensor]) -> None:
        super().__init__()
        self._meter = meter
        self._but = {x.untyped_storage()._cdata for x in but}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.hold_storages(result, self._but)
        return result


def watch(meter: Meter, module: nn.Module) -> None:
    """Meter what each layer returns, on whatever thread."""
    for layer in module.children():
        layer.register_forward_hook(lambda layer, args, output: meter.hold_storages(output))


def wide(stages: int = N) -> nn.Sequential:
    """Stages that each save ACTIVATIONS, and the BOUNDARY before them unless they are frozen."""
    layers: list[nn.Module] = []
    for _ in range(stages):
        layers += [nn.Linear(W, K * W), nn.Tanh(), nn.Linear(K * W, W)]
    return nn.Sequential(*layers).double()


Pipe = Callable[..., GPipe]


@pytest.fixture
def piped() -> Iterator[Pipe]:
    pipelines = []

    def pipe(module: nn.Sequential, balance: list[int], workers: int = N, **more: Any) -> GPipe:
        pipelines.append(GPipe(module, balance, devices=["cpu"] * workers, **more))
        return pipelines[-1]

    yield pipe
    for pipeline in pipelines:
        pipeline.close()


@pytest.fixture(autouse=True)
def _one_intra_op_thread() -> Iterator[None]:
    """Operators on a few rows gain nothing by two, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it, not even itself in a circle."""
    gc.disable()
    yield
    gc.enable()


def microbatches(m: int) -> Tensor:
    return rows(m * R, W)


def run(module: nn.Module, x: Tensor) -> None:
    """A step that leaves no gradients."""
    y = module(x)
    y.square().sum().backward()
    module.zero_grad()
    x.grad = None


def settled(meter: Meter, expected: int) -> int:
    """What is held, once workers let go of their last job, which is after they tell its end."""
    return awaited(lambda: meter.now, expected)


# Between forward and backward, and at the peak.


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("workers", [1, N])
@pytest.mark.parametrize("mode", KEPT)
def test_saved_for_backward(mode: Mode, workers: int, piped: Pipe) -> None:
    found, expected = {}, {}
    pipeline = piped(wide(), [3] * N, workers, activation_checkpointing=mode, threads=False)
    for m in ALL if mode == "always" else SOME:
        pipeline.chunks = m
        meter = Meter()
        with saving(meter, pipeline):
            y = pipeline(microbatches(m))
        between = meter.now
        y.sum().backward()
        found[m] = (between, meter.peak, meter.now)

        one = ACTIVATIONS + BOUNDARY  # a linear layer saves its input
        kept = KEPT[mode](m)
        # A worker has one micro-batch of one stage at a time, and what was kept of all stages.
        expected[m] = (kept * N * one, max(workers, kept * N) * one, 0)

    assert found == expected


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("mode", KEPT)
def test_alive_between_forward_and_backward(mode: Mode, piped: Pipe) -> None:
    found, expected = {}, {}
    pipeline = piped(wide(), [3] * N, activation_checkpointing=mode)
    run(pipeline, microbatches(1))  # in its first run a stage works on a copy of its input
    for m in SOME:
        pipeline.chunks = m
        x, meter = microbatches(m), Meter()
        with Allocating(meter, [x, *pipeline.parameters()]):
            y = pipeline(x)
        found[m] = meter.now
        del y

        kept = KEPT[mode](m)
        boundaries = (N - 1) * m + m  # the inputs of all stages but the first, and the output
        expected[m] = kept * N * ACTIVATIONS + boundaries * BOUNDARY

    assert found == expected


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("workers", [1, N])
def test_peak_of_what_is_alive(workers: int, piped: Pipe) -> None:
    x, plain, stage = microbatches(1), Meter(), wide(1).requires_grad_(False)
    with Allocating(plain, [x, *stage.parameters()]):
        run(stage, x)
    module = wide().requires_grad_(False)
    pipeline = piped(module, [3] * N, workers, activation_checkpointing="always")
    run(pipeline, x)

    found, expected = {}, {}
    for m in ALL:
        pipeline.chunks = m
        x, meter = microbatches(m), Meter()
        with Allocating(meter, [x, *pipeline.parameters()]):
            run(pipeline, x)
        found[m] = meter.peak
        # One micro-batch on one stage as in the plain module, but for the output, which its graph
        # does not keep; one that is recomputed on every other worker; and for all of them the
        # boundaries, the output and its gradient.
        stages = plain.peak - BOUNDARY + (workers - 1) * ACTIVATIONS
        expected[m] = stages + (N - 1 + 2) * m * BOUNDARY

    assert found == expected


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("mode", KEPT)
def test_alive_with_threads(mode: Mode, piped: Pipe) -> None:
    pipeline = piped(wide(), [3] * N, activation_checkpointing=mode)
    run(pipeline, microbatches(1))
    meter, saved = Meter(), Meter()
    watch(meter, pipeline)
    for m in SOME:
        pipeline.chunks = m
        meter.peak = saved.peak = 0
        with saving(saved, pipeline):
            y = pipeline(microbatches(m))

        kept = KEPT[mode](m)
        merged = int(m > 1)  # the output is then none that a layer returned
        between = kept * N * ACTIVATIONS + (N - merged) * m * BOUNDARY
        assert settled(meter, between) == between
        y.sum().backward()
        # While Tanh works there are its input and its output, and each worker may be at it.
        at_once = N * max(2, kept + 1)
        assert meter.peak <= at_once * ACTIVATIONS + (m + 1) * N * BOUNDARY
        assert saved.peak <= N * max(1, kept) * (ACTIVATIONS + BOUNDARY)
        del y
        assert settled(meter, 0) == settled(saved, 0) == 0


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("mode", KEPT)
def test_forward_without_a_backward_frees_all_when_its_outputs_go(
    mode: Mode, threads: bool, piped: Pipe
) -> None:
    module = nn.Sequential(*wide(2), Call(lambda x: (x.sin(), {"other": x.cos()})))
    pipeline = piped(module, [3, 4], 2, chunks=4, activation_checkpointing=mode, threads=threads)
    meter = Meter()
    watch(meter, pipeline)
    sine, rest = pipeline(microbatches(4))
    del sine
    assert meter.now >= KEPT[mode](4) * 2 * ACTIVATIONS + 4 * BOUNDARY

    del rest

    assert settled(meter, 0) == 0


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("mode", KEPT)
def test_output_kept_after_backward_keeps_no_activations(
    mode: Mode, threads: bool, piped: Pipe
) -> None:
    pipeline = piped(wide(), [3] * N, chunks=4, activation_checkpointing=mode, threads=threads)
    meter = Meter()
    watch(meter, pipeline)

    y = pipeline(microbatches(4))
    y.sum().backward()

    assert settled(meter, 0) == 0
    assert y.grad_fn is not None


@pytest.mark.parametrize("threads", [True, False])
def test_hooks_that_keep_what_autograd_saves(threads: bool, piped: Pipe) -> None:
    """0.1: without threads they also got what a dropped forward saves, and never let it go."""
    pipeline = piped(wide(), [3] * N, chunks=4, activation_checkpointing="always", threads=threads)
    meter = Meter()
    watch(meter, pipeline)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        y = pipeline(microbatches(4))
    y.sum().backward()
    del y

    gc.collect()
    assert settled(meter, 0) == 0


# After the step.


def census() -> tuple[int, int]:
    """The number of tensors that are alive, and the bytes of those that are no scalars."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    memory = {storage._cdata: storage.nbytes() for storage in storages}
    return len(tensors), sum(memory.values())


def all_sorts() -> nn.Sequential:
    """Tensors drawn, buffers that change, trees that pass from stage to stage, and a fuse."""
    drawing = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), Fork(3)]
    passing = [Through(nn.Linear(3, 3)), Through(Fuse()), Through(nn.Dropout())]
    return nn.Sequential(*drawing, *passing, Join(), nn.Linear(3, 3), nn.Tanh()).double()


@pytest.mark.parametrize("workers", [1, N])
def test_output_kept_after_backward_keeps_nothing(workers: int, piped: Pipe) -> None:
    """0.1: it kept the moments of batch norms, and states of generators, of each micro-batch."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Dropout()).double()
    pipeline = piped(module, [1, 1, 1], workers, chunks=4, activation_checkpointing="never")
    x = rows(8)
    run(pipeline, x)
    _, before = census()

    y = pipeline(x)
    y.square().sum().backward()
    pipeline.zero_grad()
    x.grad = None

    assert awaited(lambda: census()[1] - before, y.nbytes) == y.nbytes


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


def fail(pipeline: GPipe, kind: str) -> None:
    through = pipeline[5]
    assert isinstance(through, Through) and isinstance(through.layer, Fuse)
    through.layer.light((kind, 1), throw(OwnError()))
    with suppress(OwnError):
        train(pipeline)
    assert through.layer.at is None
    train(pipeline)


USES: dict[str, Callable[[GPipe], None]] = {
    "steps": train,
    "forwards without gradients": train_and_look,
    "forwards without a backward": train_between_forwards,
    "errors in forward": lambda pipeline: fail(pipeline, "forward"),
    "errors in backward": lambda pipeline: fail(pipeline, "backward"),
}


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_is_left(use: Callable[[GPipe], None], threads: bool, piped: Pipe) -> None:
    pipeline = piped(all_sorts(), [4, 3, 3], chunks=3, threads=threads)
    meter = Meter()
    watch(meter, pipeline)
    before = census()

    for _ in range(50):
        with saving(meter, pipeline):
            use(pipeline)

    assert awaited(census, before) == before
    assert settled(meter, 0) == 0
