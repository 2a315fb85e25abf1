"""Threads or one thread: both are timed in turns, and the faster one is taken."""

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.run.ways import INLINE, THREADS, Contest, Found, Ways, _Timed
from tests.support.faults import OwnError
from tests.support.models import Call, assert_same_step, perceptron, rows
from tests.support.pipes import Pipe, every_mode

SLOW, FAST = 3.0, 2.0


def contest(seconds: dict[bool, float]) -> tuple[Contest, list[bool]]:
    """One that has come to an end, and what it tried."""
    found, tried = Contest(), []
    while (way := found.next()) is not None:
        tried.append(way)
        found.add(way, seconds[way])
    return found, tried


@pytest.mark.parametrize("faster", [THREADS, INLINE])
def test_the_faster_way_is_found(faster: bool) -> None:
    found, tried = contest({faster: FAST, not faster: SLOW})

    assert found.found is not None and found.found.faster is faster
    assert tried == [THREADS, INLINE] * 4


def test_a_clear_difference_is_seen_at_once() -> None:
    _, tried = contest({THREADS: 1.0, INLINE: 5.0})

    assert tried == [THREADS, INLINE] * 2


def test_first_mini_batches_do_not_count() -> None:
    found = Contest()
    for way, seconds in [(THREADS, 100.0), (INLINE, 1.0)]:
        found.add(way, seconds)
    for _ in range(3):
        found.add(THREADS, FAST)
        found.add(INLINE, SLOW)

    assert found.found == Found(threads=FAST, inline=SLOW)


@pytest.mark.parametrize("faster", [THREADS, INLINE])
def test_mini_batches_that_were_held_up_do_not_decide(faster: bool) -> None:
    found = Contest()
    for held_up in (1.0, 2.0, 1.0, 2.0):
        for way in (THREADS, INLINE):
            found.add(way, FAST * held_up if way is faster else SLOW)

    assert found.found is not None
    assert found.found.faster is faster


def test_threads_that_take_longer_than_the_schedule_allows() -> None:
    quick, starved = (Found(threads=each, inline=4.0, allowed=2.0) for each in (2.9, 3.1))

    assert not quick.starved
    assert starved.starved
    assert not Found(threads=9.0, inline=4.0).starved  # where that is not known


@pytest.mark.parametrize(
    "devices, pairs, allowed",
    [(["cpu"] * 2, 5000, 4.0), (["cpu", "cuda:0"], 5000, None), (["cpu"] * 2, 7000, None)],
)
def test_what_the_schedule_allows(
    devices: list[str], pairs: int, allowed: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ways = Ways(map(torch.device, devices))
    for k in range(8):
        way = ways.next("kind", phases=1, bubble=0.25, pairs=pairs)
        assert isinstance(way.timed, _Timed)
        way.timed._contest.add(way.inline, 6.0 if way.inline else 1.0 + k)
    ways.next("kind", phases=1, bubble=0.25)

    assert ways.found is not None
    assert ways.found.allowed == allowed


def test_both_are_tried_again_after_many_mini_batches() -> None:
    found, _ = contest({THREADS: FAST, INLINE: SLOW})

    ways = [found.next() for _ in range(2000)]

    assert ways.index(THREADS) == 999
    found.add(THREADS, SLOW)
    assert found.next() is INLINE
    assert found.found is not None and found.found.faster is THREADS


def test_kinds_of_mini_batches_are_found_apart() -> None:
    ways = Ways([torch.device("cpu")])
    for kind in ("small", "large"):
        for _ in range(8):
            ways.next(kind, phases=1)
    assert ways.found is None

    with ways.next("small", phases=1).timed:
        pass

    assert not ways.next("large", phases=1).inline


def test_what_is_never_finished_does_not_count() -> None:
    ways = Ways([torch.device("cpu")])
    way = ways.next("kind", phases=2)
    for _ in range(20):
        with way.timed:
            pass
        with pytest.raises(OwnError), way.timed:
            raise OwnError
        way = ways.next("kind", phases=2)

    assert not way.inline
    assert ways.found is None


@every_mode
def test_numbers_are_those_of_the_plain_module(pipe: Pipe) -> None:
    plain = nn.Sequential(*perceptron(), nn.LayerNorm(3)).double()
    pipeline = pipe(plain, threads="auto")

    for _ in range(12):
        assert_same_step(pipeline, plain, rows(7))

    assert pipeline.engine.ways is not None and pipeline.engine.ways.found is not None


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
