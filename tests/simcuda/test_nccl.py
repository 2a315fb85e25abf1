"""The simulated NCCL waits where NCCL does, and each mistake in its use is a hazard, or a hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from tests.support.waiting import PATIENCE, awaited

if TYPE_CHECKING:
    from tests.simcuda.nccl import SimulatedNccl, Work
    from tests.simcuda.simulation import Simulation

pytestmark = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs SIMULATED_GPUS=4, as `make test` sets it"
)

ONE, OTHER = "cuda:0", "cuda:1"


class Pair:
    """Both ends of a communicator, and a thread for each, as if they were two processes."""

    def __init__(self) -> None:
        from tests.simcuda.nccl import NcclOptions, SimulatedNccl

        store = HashStore()
        self.ends = [SimulatedNccl(store, rank, 2, NcclOptions()) for rank in (0, 1)]
        self._threads = [ThreadPoolExecutor(1) for _ in self.ends]

    def run(self, *functions: Callable[[SimulatedNccl], Any]) -> list[Any]:
        """Call a function for each end, both at once."""
        calls = zip(self._threads, functions, self.ends, strict=True)
        futures = [thread.submit(function, end) for thread, function, end in calls]
        return [future.result(PATIENCE) for future in futures]

    def close(self) -> None:
        for end in self.ends:
            end.abort()
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def send(end: SimulatedNccl) -> None:
    x = torch.arange(1000.0, device=ONE)
    end.send([x], 1).wait()


def receive(end: SimulatedNccl) -> Tensor:
    y = torch.empty(1000, device=OTHER)
    end.recv([y], 0).wait()
    return (y + 1).cpu()


def receive_without_a_wait(end: SimulatedNccl) -> Tensor:
    y = torch.empty(1000, device=OTHER)
    work = end.recv([y], 0)
    result = (y + 1).cpu()
    work.wait()
    return result


def only(hazards: list[str]) -> str:
    assert len(hazards) == 1, hazards
    return hazards[0]


def test_tensor_arrives(pair: Pair) -> None:
    for _ in range(2):
        _, y = pair.run(send, receive)

        assert y.equal(torch.arange(1.0, 1001.0))


def test_order_of_operations(pair: Pair) -> None:
    def send_three(end: SimulatedNccl) -> None:
        contents = [torch.full((2,), float(k), device=ONE) for k in range(3)]
        for work in [end.send([content], 1) for content in contents]:
            work.wait()

    def receive_three(end: SimulatedNccl) -> list[float]:
        rooms = [torch.empty(2, device=OTHER) for _ in range(3)]
        for work in [end.recv([room], 0) for room in rooms]:
            work.wait()
        return [room.sum().item() for room in rooms]

    assert pair.run(send_three, receive_three)[1] == [0.0, 2.0, 4.0]


# Hazards.


def test_receive_that_is_not_waited_for(simulation: Simulation, pair: Pair) -> None:
    pair.run(send, receive_without_a_wait)

    hazards = simulation.take_hazards()
    assert hazards[0].startswith("race: aten::add reads on cuda:1/stream 0 what aten::fill_ writes")


def test_send_on_a_stream_that_does_not_wait_for_the_tensor(
    simulation: Simulation, pair: Pair
) -> None:
    def send_elsewhere(end: SimulatedNccl) -> Work:
        x = torch.ones(1000, device=ONE)
        with torch.cuda.stream(torch.cuda.Stream(ONE)):
            work = end.send([x], 1)
        work.wait()
        return work

    pair.run(send_elsewhere, receive)

    assert only(simulation.take_hazards()).startswith("race: aten::copy_ reads on cuda:0/stream")


def test_edit_of_a_tensor_that_is_being_sent(simulation: Simulation, pair: Pair) -> None:
    def send_and_edit(end: SimulatedNccl) -> None:
        x = torch.ones(1000, device=ONE)
        work = end.send([x], 1)
        x.add_(1)
        work.wait()

    pair.run(send_and_edit, receive)

    assert "race: aten::add writes on cuda:0/stream 0" in only(simulation.take_hazards())


@pytest.mark.parametrize("keeps", ["nothing", "until wait", "until completed"])
def test_sent_tensor_lives_until_the_send_has_ended(
    simulation: Simulation, pair: Pair, keeps: str
) -> None:
    def send_and_free(end: SimulatedNccl) -> None:
        x = torch.ones(1000, device=ONE)
        work = end.send([x], 1)
        if keeps == "until wait":
            work.wait()
        elif keeps == "until completed":
            awaited(work.is_completed, True)
        del x

    pair.run(send_and_free, receive)

    hazards = simulation.take_hazards()
    if keeps == "nothing":
        assert only(hazards).startswith("freed too early: 4000 bytes allocated on cuda:0/stream 0")
    else:
        assert hazards == []


def test_receive_that_another_stream_still_reads(simulation: Simulation, pair: Pair) -> None:
    def receive_and_free(end: SimulatedNccl) -> None:
        side = torch.cuda.Stream(OTHER)
        with torch.cuda.stream(side):
            y = torch.empty(1000, device=OTHER)
            end.recv([y], 0).wait()
        torch.cuda.current_stream(OTHER).wait_stream(side)
        y + 1
        del y

    pair.run(send, receive_and_free)

    assert "freed too early" in only(simulation.take_hazards())


# Waits. What is aborted is freed too early.

aborting = pytest.mark.usefixtures("simulation")


@aborting
@pytest.mark.parametrize("first", ["receive", "send"])
def test_both_do_the_same_first(pair: Pair, first: str) -> None:
    """They wait for ever, until both are aborted."""
    pair.run(send, receive)
    rooms = [torch.ones(1, device=device) for device in (ONE, OTHER)]

    def begin(end: SimulatedNccl) -> list[Work]:
        rank = end.rank()
        calls = {"receive": end.recv, "send": end.send}
        return [
            calls.pop(name)([rooms[rank]], 1 - rank) for name in sorted(calls, key=first.__ne__)
        ]

    works = [work for found in pair.run(begin, begin) for work in found]
    assert not any(work.ended.wait(0.3) for work in works)

    for end in pair.ends:
        end.abort()
    for work in works:
        if work.blocks:
            with pytest.raises(RuntimeError, match="aborted"):
                work.wait()


@aborting
def test_other_process_is_lost(pair: Pair) -> None:
    """Nothing but an abort ends the wait for it."""
    pair.run(send, receive)
    work = pair.run(lambda end: None, lambda end: end.recv([torch.ones(1, device=OTHER)], 0))[1]

    pair.ends[0].abort()
    assert not work.ended.wait(0.3)

    pair.ends[1].abort()
    with pytest.raises(RuntimeError, match="aborted"):
        work.wait()


def test_other_process_does_not_come(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(send, pair.ends[0])
        pair.ends[0].abort()

        assert isinstance(waiting.exception(PATIENCE), RuntimeError)


@aborting
def test_receive_of_another_size_hangs(pair: Pair) -> None:
    def receive_less(end: SimulatedNccl) -> Work:
        return end.recv([torch.empty(10, device=OTHER)], 0)

    assert not pair.run(send, receive_less)[1].ended.wait(0.3)


def test_same_gpu_at_both_ends(pair: Pair) -> None:
    def receive_on_the_same(end: SimulatedNccl) -> None:
        end.recv([torch.empty(1000, device=ONE)], 0)

    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        pair.run(send, receive_on_the_same)


def test_tensor_of_the_host_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="on a GPU: got one on cpu"):
        pair.ends[0].send([torch.ones(1)], 1)
