"""The devices of a plan, as they are written."""

import pytest

from lightning_gpipe.commands.places import places_of
from lightning_gpipe.core.balance import Place


def test_devices_as_they_are_written() -> None:
    assert places_of(2, ["1KiB"], []) == ([Place(memory=1024)] * 2, None)
    places, operations = places_of(None, ["1KB", "2KB"], ["2TFLOPS", "1TFLOPS"])
    assert places == [Place(speed=1, memory=1000), Place(speed=0.5, memory=2000)]
    assert operations == 2e12
    [place], _ = places_of(1, [], [], "64GB/s")
    assert place.host_speed == 64e9
    assert places_of(2, [], [], None, "50GB/s")[0] == [Place(replica_speed=50e9)] * 2


@pytest.mark.parametrize(
    "devices, memory, speed, match",
    [
        (3, ["1B", "1B"], [], "got 2 for 3 devices"),
        (2, [], ["fast"], "must be a factor such as 2"),
        (2, [], ["0"], "positive"),
        (2, [], ["1", "1TFLOPS"], "factors only, or operations only"),
        (0, [], [], "one at least"),
    ],
)
def test_devices_that_cannot_be(
    devices: int, memory: list[str], speed: list[str], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        places_of(devices, memory, speed)
