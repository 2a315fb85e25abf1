from lightning_gpipe.core.run.clocks import HostClock, clock_of
from tests.support.waiting import awaited


def test_host_clock_goes_forward() -> None:
    clock = HostClock()
    first = clock.now()

    assert awaited(lambda: clock.now() > first, True)  # a coarse clock takes its time


def test_seconds_of_the_host_are_its_timestamps() -> None:
    clock = HostClock()
    now = clock.now()

    assert clock.reading()(now) == now


def test_worker_without_a_stream_has_the_host_s_clock() -> None:
    assert isinstance(clock_of(None), HostClock)
