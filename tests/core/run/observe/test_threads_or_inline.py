"""Threads or one thread: as few mini-batches as possible run in the slower way."""

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run.observe.threads_or_inline import (
    INLINE,
    THREADS,
    RunnerComparison,
    RunTimes,
    ThreadsOrInline,
)
from tests.support.faults import OwnError
from tests.support.models import Call, assert_same_step, perceptron, rows
from tests.support.pipes import Pipe, every_mode

SLOW, FAST = 3.0, 2.0
PAIRS = 16
HEAVY = 1e9  # multiplications of a micro-batch on a stage
MIDDLE = 5e-4  # seconds of a pair: neither small nor large


@pytest.fixture(autouse=True)
def both_ways() -> None:
    """These tests are of what other tests leave out: when one way is enough."""


def compare(
    seconds: dict[bool, float],
    *,
    computed: float = 0.0,
    pairs: int = 0,
    begin: bool = THREADS,
) -> tuple[RunnerComparison, list[bool]]:
    """A comparison that has come to an end, and what it tried.

    Args:
        seconds: How long a mini-batch takes either way; with one thread it computes all the time.
        computed: How long the threads compute in it.
        pairs: The number of stages times that of micro-batches.
        begin: The way of the first one.
    """
    made, tried = RunnerComparison(pairs, begin), []
    while (way := made.next()) is not None:
        tried.append(way)
        made.add(way, seconds[way], seconds[INLINE] if way is INLINE else computed)
    return made, tried


def test_threads_that_compute_for_longer_than_they_take() -> None:
    """Once four of the first eight mini-batches ran on one thread, whatever it took."""
    made, tried = compare({THREADS: 0.1, INLINE: 0.19}, computed=0.18, pairs=PAIRS)

    assert tried == [THREADS, THREADS]
    assert made.times == RunTimes(0.1, 0.18, clear=True)
    assert f"{made.times}" == (
        "a thread for each device: 100.0 ms per mini-batch, in which they compute for 180.0 ms"
    )


def test_large_operators_on_a_busy_machine() -> None:
    """One mini-batch on one thread is enough."""
    made, tried = compare({THREADS: 0.2, INLINE: 0.3}, computed=0.17, pairs=PAIRS)

    assert tried == [THREADS, THREADS, INLINE]
    assert made.times == RunTimes(0.2, 0.3)


def test_large_operators_where_small_ones_were_expected() -> None:
    seconds = {THREADS: 0.1, INLINE: 0.19}

    _, tried = compare(seconds, computed=0.18, pairs=PAIRS, begin=INLINE)

    assert tried == [INLINE, THREADS]


@pytest.mark.parametrize("begin", [THREADS, INLINE])
def test_operators_for_which_no_thread_is_worth_waking(begin: bool) -> None:
    """Once four of the first eight mini-batches ran on threads, whatever they took."""
    seconds = {THREADS: 2e-3, INLINE: 1e-3}

    made, tried = compare(seconds, computed=2e-3, pairs=PAIRS, begin=begin)

    assert tried == [begin, INLINE]
    assert made.times is not None and made.times.faster is INLINE
    assert f"{made.times}" == (
        "one thread for all devices: 1.0 ms per mini-batch, too little for threads"
    )


@pytest.mark.parametrize(
    "begin, faster, tried",
    [
        (THREADS, THREADS, [THREADS, INLINE]),
        (INLINE, THREADS, [INLINE, INLINE, THREADS]),
        (THREADS, INLINE, [THREADS, INLINE] * 3),
        (INLINE, INLINE, [INLINE, *[INLINE, THREADS] * 3]),
    ],
)
def test_operators_between(begin: bool, faster: bool, tried: list[bool]) -> None:
    seconds = {faster: PAIRS * MIDDLE, not faster: 1.5 * PAIRS * MIDDLE}

    made, found = compare(seconds, computed=PAIRS * MIDDLE, pairs=PAIRS, begin=begin)

    assert found == tried
    assert made.times is not None and made.times.faster is faster
    assert "with" in f"{made.times}"


@pytest.mark.parametrize("faster", [THREADS, INLINE])
def test_ways_that_take_about_as_long(faster: bool) -> None:
    made, tried = compare({faster: FAST, not faster: 1.1 * FAST})

    assert made.times is not None and made.times.faster is faster
    assert tried == [THREADS, INLINE] * 3


@pytest.mark.parametrize("faster", [THREADS, INLINE])
def test_mini_batches_that_were_held_up_do_not_decide(faster: bool) -> None:
    made = RunnerComparison()
    for held_up in (2.0, 2.0, 1.0, 2.0):
        for way in (THREADS, INLINE):
            if made.next() is way:
                seconds = FAST if way is faster else SLOW
                made.add(way, held_up * seconds, seconds)

    assert made.times is not None
    assert made.times.faster is faster


@pytest.mark.parametrize("work, pairs, way", [(1e3, PAIRS, INLINE), (HEAVY, PAIRS, THREADS)])
def test_first_mini_batch_runs_as_the_size_of_the_layers_suggests(
    work: float, pairs: int, way: bool
) -> None:
    ways = ThreadsOrInline([torch.device("cpu")] * 2)

    assert ways.next("kind", 1, pairs, work).inline is way
    assert not ThreadsOrInline([torch.device("cuda:0")]).next("kind", 1, pairs, work).inline


def test_both_are_tried_again_after_many_mini_batches() -> None:
    found, _ = compare({THREADS: FAST, INLINE: SLOW})

    ways = [found.next() for _ in range(2000)]

    assert ways.index(THREADS) == 999
    found.add(THREADS, SLOW, 0.0)
    assert found.next() is INLINE
    assert found.times is not None and found.times.faster is THREADS


def test_kinds_of_mini_batches_are_found_apart() -> None:
    ways = ThreadsOrInline([torch.device("cpu")])
    for kind in ("small", "large"):
        for _ in range(8):
            ways.next(kind, 1, PAIRS, HEAVY)
    assert ways.times is None

    with ways.next("small", 1, PAIRS, HEAVY).timed:
        pass

    assert not ways.next("large", 1, PAIRS, HEAVY).inline


def test_what_is_never_finished_does_not_count() -> None:
    ways = ThreadsOrInline([torch.device("cpu")])
    way = ways.next("kind", 2, PAIRS, HEAVY)
    for _ in range(20):
        with way.timed:
            pass
        with pytest.raises(OwnError), way.timed:
            raise OwnError
        way = ways.next("kind", 2, PAIRS, HEAVY)

    assert not way.inline
    assert ways.times is None


@every_mode
def test_numbers_are_those_of_the_plain_module(pipe: Pipe) -> None:
    plain = nn.Sequential(*perceptron(), nn.LayerNorm(3)).double()
    pipeline = pipe(plain, threads="auto")

    for _ in range(12):
        assert_same_step(pipeline, plain, rows(7))

    assert pipeline.engine.ways is not None and pipeline.engine.ways.times is not None


def test_operators_use_as_many_threads_either_way(pipe: Pipe) -> None:
    """Sums over a different number of threads have other last bits."""
    seen: list[int] = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        pipeline = pipe(nn.Sequential(Call(look), Call(look)), threads="auto")
        for _ in range(12):
            pipeline(rows(7))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)

    assert set(seen) == {2}


def test_random_numbers_are_the_same_either_way(pipe: Pipe) -> None:
    found = []
    for threads in (True, False, "auto"):
        torch.manual_seed(7)
        module = nn.Sequential(nn.Dropout(), nn.Linear(3, 3), nn.Dropout()).double()
        pipeline = pipe(module, threads=threads)
        for parameter in pipeline.parameters():
            nn.init.constant_(parameter, 0.5)
        found.append(torch.stack([pipeline(rows(7)).detach() for _ in range(12)]))

    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_it_is_the_default() -> None:
    pipeline = GPipe(perceptron(), [2, 2], devices=["cpu"] * 2)

    assert pipeline.engine.ways is not None
    assert GPipe(perceptron(), [4], devices=["cpu"]).engine.ways is None
    pipeline.close()
