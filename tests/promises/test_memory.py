"""Cost: with recomputation, the activations of one micro-batch at a time are in memory."""

import pytest
import torch

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.meters import (
    ACTIVATIONS,
    BOUNDARY,
    KEPT,
    Allocating,
    Meter,
    N,
    microbatches,
    run,
    saving,
    settled,
    watch,
    wide,
)
from tests.support.pipes import Pipe

pytestmark = pytest.mark.usefixtures("one_intra_op_thread", "no_collector")

ALL, SOME = range(1, 33), (1, 2, 3, 8, 31, 32)  # m


@pytest.mark.parametrize("workers", [1, N])
@pytest.mark.parametrize("mode", KEPT)
def test_saved_for_backward(mode: ActivationCheckpointing, workers: int, pipe: Pipe) -> None:
    found, expected = {}, {}
    pipeline = pipe(wide(), stages=N, devices=workers, threads=False)
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


@pytest.mark.parametrize("mode", KEPT)
def test_alive_between_forward_and_backward(mode: ActivationCheckpointing, pipe: Pipe) -> None:
    found, expected = {}, {}
    pipeline = pipe(wide(), stages=N)
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


def test_stages_that_recompute_differently_keep_as_much_as_each_says(pipe: Pipe) -> None:
    m, recomputed = 4, [j % 5 for j in range(N)]
    pipeline = pipe(wide(), stages=N, chunks=m, mode=recomputed)
    run(pipeline, microbatches(1))
    x, meter = microbatches(m), Meter()

    with Allocating(meter, [x, *pipeline.parameters()]):
        y = pipeline(x)

    kept = sum(m - k for k in recomputed)
    assert meter.now == kept * ACTIVATIONS + ((N - 1) * m + m) * BOUNDARY
    del y


@pytest.mark.parametrize("workers", [1, N])
def test_peak_of_what_is_alive(workers: int, pipe: Pipe) -> None:
    x, plain, stage = microbatches(1), Meter(), wide(1).requires_grad_(False)
    with Allocating(plain, [x, *stage.parameters()]):
        run(stage, x)
    module = wide().requires_grad_(False)
    pipeline = pipe(module, stages=N, devices=workers, mode="always")
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
        # boundaries, the output and its gradient. Workers that share a generator keep its state.
        stages = plain.peak - BOUNDARY + (workers - 1) * ACTIVATIONS
        stages += torch.get_rng_state().nbytes * (workers > 1)
        expected[m] = stages + (N - 1 + 2) * m * BOUNDARY

    assert found == expected


@pytest.mark.parametrize("mode", KEPT)
def test_alive_with_threads(mode: ActivationCheckpointing, pipe: Pipe) -> None:
    pipeline = pipe(wide(), stages=N)
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
