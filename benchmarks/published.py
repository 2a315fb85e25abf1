"""A published experiment as a contest: the same stages and micro-batches here and in torchgpipe.

The experiments were made on four Tesla P40. With fewer GPUs the four stages share them; on one GPU
nothing runs at the same time, and the comparison is of what the two packages add to the layers, in
time and in memory.

First a small model of the same layers shows that all compute the same gradients. That is done in
float64: models this deep make several per cent of float32's rounding alone. Then each contestant
is built, measured for its memory, and freed; then all are built again and timed in turns.

A step is a forward, the loss of the whole mini-batch and a backward, in float32 with the defaults
of PyTorch (TF32 in convolutions, cuDNN's heuristics). Plain SGD, which the papers use, has no state
and would cost all the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.contestants.plain import accumulated
from benchmarks.contestants.task import Loss, Task
from benchmarks.contestants.torchgpipe import torchgpipe
from benchmarks.harness import (
    Contestant,
    Options,
    Report,
    Times,
    agree,
    contest,
    options,
    ratio,
)
from benchmarks.harness.gauge import Gauge, Peak
from lightning_gpipe import GPipe

STAGES = 4
FULL_SIZE = 70 * 2**30
"""A GPU of so much memory or more runs an experiment's ``full`` size."""
CHOICE = 7
"""Steps in which ours has chosen between a thread for each of several workers and one for all."""
PLAIN, THEIRS = "plain, gradients accumulated", "torchgpipe"


@dataclass(frozen=True)
class Size:
    """A model, and its mini-batch: ``batch`` images of ``side`` × ``side`` in ``chunks``."""

    build: Callable[[], nn.Sequential]
    side: int
    batch: int
    chunks: int


@dataclass(frozen=True)
class Experiment:
    """One that was published.

    Attributes:
        title: The model.
        balance: The published one for four stages.
        full: What is timed on a GPU.
        small: The same layers, but narrow, and small images: what must agree before, and all that
            runs on a CPU.
        loss: Of the output and the target.
        target: For the images.
        stated: What was published, and which settings were scaled.
        deferred: Whether there are batch norms whose statistics could be deferred.
    """

    title: str
    balance: Sequence[int]
    full: Size
    small: Size
    loss: Loss
    target: Callable[[Tensor], Tensor]
    stated: str
    deferred: bool = False


def classes_of(images: Tensor) -> Tensor:
    """One of ten classes for each image."""
    return torch.randint(10, (len(images),), device=images.device)


def measure(name: str, doc: str | None, experiment: Experiment, argv: list[str] | None) -> None:
    """The ``main`` of an experiment's file."""
    given = options(
        name,
        doc,
        rounds=15,
        argv=argv,
        size="",
        batch=0,
        chunks=0,
        mode="except_last",
        seconds=25.0,
    )
    places = placement(torch.cuda.device_count())
    size = choose(experiment, given, places[0])
    if places[0] == "cpu":
        torch.set_num_threads(1)  # the small size is not worth more
    check(experiment, given.mode, places)

    task = task_of(experiment, size, places[0], torch.float32)
    entries = entries_of(experiment, task, size.chunks, given.mode, places)
    peaks: dict[str, Peak] = {}
    seconds: dict[str, float] = {}
    for each in entries:
        peaks[each], seconds[each] = alone(entries[each], places)
    with ExitStack() as stack:
        contestants = [stack.enter_context(make()) for make in entries.values()]
        for one in contestants:
            for _ in range(CHOICE if "workers" in one.name else 0):
                one.step()
        times = contest(
            contestants,
            rounds=rounds_in(given.seconds, sum(seconds.values()), given.rounds),
            warm_up=1,
            synchronize=Gauge(places).synchronize,
        )

    publish(given, experiment, size, places, times, peaks)


def publish(
    given: Options,
    experiment: Experiment,
    size: Size,
    places: Sequence[str],
    times: Mapping[str, Times],
    peaks: Mapping[str, Peak],
) -> None:
    """Report what was found; small sizes and CPUs claim nothing."""
    narrow = size.build is experiment.small.build
    report = Report(
        given,
        f"{experiment.title}{', but narrow' * narrow}: {size.batch} images of {size.side} x "
        f"{size.side}, {STAGES} stages on {in_words(places)}, m = {size.chunks}, {given.mode}",
        columns=("", "ms, median", "quartiles", "samples/s", "GiB allocated", "GiB reserved"),
    )
    report.times(
        times,
        {each: number_or_dash(size.batch / times[each].median, ".1f") for each in times},
        {each: number_or_dash(peaks[each].allocated / 2**30, ".2f") for each in times},
        {each: number_or_dash(peaks[each].reserved / 2**30, ".2f") for each in times},
    )
    claimed = not narrow and places[0] != "cpu"
    for each in [name for name in times if name.startswith("ours")]:
        bound = 1.0 if claimed and "deferred" not in each else None
        found = ratio(times, THEIRS, each)
        report.target(f"throughput, {each} / {THEIRS}", found, at_least=bound)
        if places[0] == "cpu":
            continue
        for kind, one, other in zip(Peak._fields, peaks[each], peaks[THEIRS], strict=True):
            report.target(f"peak memory {kind}, {each} / {THEIRS}", one / other, at_most=bound)
    report.notes += [experiment.stated, remark(places, claimed=claimed)]
    report.publish()


def placement(gpus: int) -> list[str]:
    """The device of each stage; on a CPU they share it too."""
    if not gpus:
        return ["cpu"] * STAGES
    used = max(d for d in (1, 2, STAGES) if d <= gpus)
    return [f"cuda:{j % used}" for j in range(STAGES)]


def choose(experiment: Experiment, given: Options, device: str) -> Size:
    """The size that was asked for, or that fits the device."""
    size = experiment.small
    if given.size == "full" or (not given.size and device != "cpu"):
        size = experiment.full
        if device != "cpu":
            memory = torch.cuda.get_device_properties(device).total_memory
            size = replace(size, batch=scaled(size.batch, size.chunks, memory))
    if given.batch or given.chunks:
        size = replace(size, batch=given.batch or size.batch, chunks=given.chunks or size.chunks)
    return size


def scaled(batch: int, chunks: int, memory: int) -> int:
    """The part of a batch for the part of :data:`FULL_SIZE` that there is, in equal chunks.

    Each has two images at least, as batch norms need several values.
    """
    rows = int(batch * min(1.0, memory / FULL_SIZE)) // chunks
    return chunks * max(2, rows)


def task_of(experiment: Experiment, size: Size, device: str, dtype: torch.dtype) -> Task:
    """The model and a mini-batch, on the device of the first stage."""
    torch.manual_seed(0)
    with torch.device(device):
        module = size.build().to(dtype)
        images = torch.randn(size.batch, 3, size.side, size.side, dtype=dtype)
    return Task(module, images, experiment.target(images), experiment.loss)


def check(experiment: Experiment, mode: str, places: Sequence[str]) -> None:
    """Raise unless all contestants compute the same gradients of the small model."""
    task = task_of(experiment, experiment.small, places[0], torch.float64)
    for layer in task.module.modules():
        if isinstance(layer, nn.Dropout2d):
            layer.p = 0.0  # and still in training mode: theirs recomputes in no other
    entries = entries_of(experiment, task, experiment.small.chunks, mode, places)
    with ExitStack() as stack:
        # Another order of the same sums, in this many layers, makes 1e-8 of an error of 1e-16.
        agree([stack.enter_context(make()) for make in entries.values()], rtol=1e-6, atol=0.0)


Make = Callable[[], AbstractContextManager[Contestant]]


def entries_of(
    experiment: Experiment, task: Task, chunks: int, mode: str, places: Sequence[str]
) -> dict[str, Make]:
    """Who takes part, each built when it is called for."""
    pipelined = replace(task, target=task.target.to(places[-1]))
    balance = experiment.balance
    entries: dict[str, Make] = {
        PLAIN: lambda: nullcontext(accumulated(task, chunks=chunks, name=PLAIN)),
        THEIRS: lambda: nullcontext(
            torchgpipe(pipelined, balance, chunks=chunks, mode=mode, devices=places, name=THEIRS)
        ),
    }

    def add(workers: Sequence[str], *, deferred: bool = False) -> None:
        name = f"ours, {len(workers)} worker{'s' * (len(workers) > 1)}" + ", deferred" * deferred
        entries[name] = lambda: pipeline(
            name, pipelined, balance, workers, chunks, mode, deferred=deferred
        )

    used = list(dict.fromkeys(places))
    add(used)
    if len(used) < len(places):
        add(places)
    if experiment.deferred:
        add(used, deferred=True)
    return entries


@contextmanager
def pipeline(
    name: str,
    task: Task,
    balance: Sequence[int],
    devices: Sequence[str],
    chunks: int,
    mode: str,
    *,
    deferred: bool,
) -> Iterator[Contestant]:
    """Ours; theirs defers the statistics of batch norms only on request."""
    model = GPipe(
        task.copy_of_module(),
        balance,
        devices=devices,
        chunks=chunks,
        activation_checkpointing=mode,  # type: ignore[arg-type]  # a mode; GPipe checks it
        deferred_batch_norm=deferred,
    )
    try:
        yield task.contestant(name, model, list(model.parameters()))
    finally:
        model.close()


def alone(make: Make, places: Sequence[str]) -> tuple[Peak, float]:
    """The peak of a contestant's memory while no other is there, and the seconds of a step."""
    gauge = Gauge(places)
    seconds: list[float] = []
    with make() as contestant:
        if not contestant.installed:
            return Peak(), 0.0

        def steps(number: int) -> None:
            for _ in range(number):
                start = time.perf_counter()
                contestant.step()
                gauge.synchronize()
                seconds.append(time.perf_counter() - start)

        steps(1)  # starts threads, and makes workspaces
        peak = gauge.peak(lambda: steps(2))
    return peak, statistics.fmean(seconds[1:])


def rounds_in(seconds: float, each: float, most: int) -> int:
    """How many rounds there is time for, ``each`` so many seconds long; three at least."""
    return min(most, max(3, round(seconds / each)))


def number_or_dash(number: float, form: str) -> str:
    """For a table; what was not measured is NaN."""
    return "-" if math.isnan(number) else format(number, form)


def in_words(places: Sequence[str]) -> str:
    """Such as "one GPU"."""
    used = len(set(places))
    if places[0] == "cpu":
        return "a CPU"
    return "one GPU" if used == 1 else f"{used} GPUs"


def remark(places: Sequence[str], *, claimed: bool) -> str:
    """What these figures do not show."""
    if places[0] == "cpu":
        return "On a CPU, small: it shows that all of this runs. Nothing is claimed of the figures."
    words = "" if claimed else "A small size: nothing is claimed of the figures. "
    if len(set(places)) == len(places):
        return f"{words}One stage per GPU, as published. Memory is summed over the GPUs."
    return (
        f"{words}Stages share {in_words(places)}: this shows what a pipeline adds in time "
        "and memory, and not how much faster several GPUs are than one, nor copies between them."
    )
