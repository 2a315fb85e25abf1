"""The simulated GPUs report each kind of hazard, and nothing else."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.simcuda.simulation import Simulation

pytestmark = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs SIMULATED_GPUS=4, as `make test` sets it"
)

ONE, OTHER = "cuda:0", "cuda:1"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(1000, device=ONE)


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream(ONE)


def only(hazards: list[str]) -> str:
    assert len(hazards) == 1, hazards
    return hazards[0]


# Races.


def test_read_without_a_wait(simulation: Simulation, x: torch.Tensor, side) -> None:
    with torch.cuda.stream(side):
        x + 1

    text = only(simulation.take_hazards())

    assert text.startswith("race: aten::add reads on cuda:0/stream")
    assert "what aten::fill_ writes on cuda:0/stream 0" in text


def test_write_without_a_wait_for_the_reader(simulation: Simulation, x: torch.Tensor, side) -> None:
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        y = x + 1

    x.add_(y.size(0))

    assert only(simulation.take_hazards()).startswith("race: aten::add writes on cuda:0/stream 0")


def test_event_that_comes_too_early(simulation: Simulation, x: torch.Tensor, side) -> None:
    event = torch.cuda.current_stream(ONE).record_event()
    x.mul_(2)

    side.wait_event(event)
    with torch.cuda.stream(side):
        x + 1

    assert "what aten::mul writes" in only(simulation.take_hazards())


def test_copy_between_devices_on_a_stream_that_does_not_wait(
    simulation: Simulation, x: torch.Tensor, side
) -> None:
    with torch.cuda.stream(side):
        copy = x.to(OTHER)

    assert copy.device == torch.device(OTHER)
    assert only(simulation.take_hazards()).startswith("race: aten::copy_ reads on cuda:0/stream")


def test_copy_between_devices_whose_arrival_is_not_waited_for(
    simulation: Simulation, x: torch.Tensor
) -> None:
    arriving = torch.cuda.Stream(OTHER)
    with torch.cuda.stream(arriving):
        copy = x.to(OTHER)

    copy + 1

    assert "what aten::copy_ writes" in only(simulation.take_hazards())


@pytest.mark.parametrize("how", ["stream", "event", "host", "item"])
def test_wait(simulation: Simulation, x: torch.Tensor, side, how: str) -> None:
    main = torch.cuda.current_stream(ONE)
    if how == "stream":
        side.wait_stream(main)
    elif how == "event":
        side.wait_event(main.record_event())
    elif how == "host":
        torch.cuda.synchronize(ONE)
    else:
        x[0].item()
    with torch.cuda.stream(side):
        y = x + 1
    main.wait_stream(side)
    y.add_(x)

    assert simulation.take_hazards() == []


def test_two_streams_read(simulation: Simulation, x: torch.Tensor, side) -> None:
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        x + 1
    x + 1

    assert simulation.take_hazards() == []


def test_streams_that_write_different_rows(simulation: Simulation, x: torch.Tensor, side) -> None:
    first, second = x.split(500)
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        first.add_(1)
    second.add_(1)

    assert simulation.take_hazards() == []


def test_backward_on_the_streams_of_forward(simulation: Simulation, x: torch.Tensor, side) -> None:
    weight = torch.ones(1000, device=ONE, requires_grad=True)
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        loss = (x * weight).to(OTHER).sum()

    loss.backward()

    assert weight.grad is not None
    weight.grad.add_(1)
    assert simulation.take_hazards() == []


# Memory.


def test_memory_freed_without_record_stream(simulation: Simulation, side) -> None:
    x = torch.ones(1000, device=ONE)
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        x + 1

    del x

    text = only(simulation.take_hazards())
    assert text.startswith("freed too early: 4000 bytes allocated on cuda:0/stream 0")
    assert "aten::add reads them on cuda:0/stream" in text


@pytest.mark.parametrize("how", ["record_stream", "wait"])
def test_memory_freed_in_time(simulation: Simulation, side, how: str) -> None:
    x = torch.ones(1000, device=ONE)
    main = torch.cuda.current_stream(ONE)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        x.add_(1)
    if how == "wait":
        main.wait_stream(side)
    else:
        x.record_stream(side)

    del x

    assert simulation.take_hazards() == []


@pytest.mark.parametrize("waits", [True, False])
def test_memory_freed_after_a_recorded_stream_that_waits_for_others(
    simulation: Simulation, side, waits: bool
) -> None:
    """What the named stream has waited for until then has ended, too."""
    x = torch.ones(1000, device=ONE)
    named = torch.cuda.Stream(ONE)
    side.wait_stream(torch.cuda.current_stream(ONE))
    with torch.cuda.stream(side):
        x.add_(1)
    x.record_stream(named)
    if waits:
        named.wait_stream(side)

    del x

    assert len(simulation.take_hazards()) == (not waits)


def test_memory_that_is_read_before_it_is_written() -> None:
    assert torch.empty(1000, device=ONE).isnan().all()


def test_bytes_are_counted_by_device(x: torch.Tensor) -> None:
    before = torch.cuda.memory_allocated(OTHER)
    torch.cuda.reset_peak_memory_stats(OTHER)

    y = torch.ones(1000, device=OTHER)
    del y

    assert torch.cuda.memory_allocated(OTHER) == before
    assert torch.cuda.max_memory_allocated(OTHER) == before + 4000


def test_memory_beyond_a_limit() -> None:
    total = torch.cuda.get_device_properties(OTHER).total_memory
    limit = torch.cuda.memory_allocated(OTHER) + 8000
    torch.cuda.set_per_process_memory_fraction(limit / total, OTHER)
    try:
        x = torch.ones(1000, device=OTHER)
        y = x + 1  # the result of an operator

        for take in (partial(torch.empty, 1, device=OTHER), partial(torch.add, x, y)):
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                take()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, OTHER)


def test_pinned_memory() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(0, pin_memory=True)[:0].numel() == 0
    assert torch.empty(4, pin_memory=True)[2:].is_pinned()
    assert not torch.ones(3).is_pinned()


# Devices.


@pytest.mark.parametrize("other", [OTHER, "cpu"])
def test_tensors_of_two_devices_in_one_operator(x: torch.Tensor, other: str) -> None:
    with pytest.raises(RuntimeError, match=f"found at least two devices, {ONE} and {other}"):
        x + torch.ones(1000, device=other)


def test_number_on_the_host_beside_a_tensor(x: torch.Tensor) -> None:
    assert (x + torch.tensor(2.0)).device == torch.device(ONE)


def test_device_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("draw", [torch.rand_like, torch.nn.functional.dropout, torch.rrelu])
def test_each_device_has_its_generator(draw) -> None:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(1)
        host = torch.get_rng_state()

        first = draw(-torch.ones(100, device=ONE))
        draw(-torch.ones(50, device=OTHER))
        torch.cuda.manual_seed_all(1)
        draw(-torch.ones(50, device=OTHER))
        again = draw(-torch.ones(100, device=ONE))

        torch.testing.assert_close(again, first, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), host)
