"""Pictures of plans."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lightning_gpipe.core.balance import LayerProfile, LinearCost, ModelProfile, Place
from lightning_gpipe.core.planner import Plan, plan_for
from lightning_gpipe.core.show import plan_picture

GIB = 2**30


def planned(places: list[Place]) -> Plan:
    cost = LinearCost(0, 1)
    layer = LayerProfile("", cost, cost, cost, LinearCost(0, GIB), parameter_bytes=GIB)
    profile = ModelProfile((layer,) * len(places), (), LayerProfile("around"), 4, 1, "s", "cpu")
    return plan_for(profile, places, stages=len(places), chunks=4)


def drawn(places: list[Place]) -> list[Any]:
    """The axes of the picture of a plan: the timeline's, and the memory's."""
    return list(plan_picture(planned(places).prediction).axes)


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_memory_of_each_device_stays_below_its_limit() -> None:
    timeline, memory = drawn([Place(memory=6 * GIB), Place(memory=8 * GIB)])

    assert [label.get_text() for label in timeline.get_yticklabels()] == ["device 0", "device 1"]
    assert words(memory) == ["device 0", "device 1"]
    assert [text.get_text() for text in memory.texts] == ["limit: 6 GiB", "limit: 8 GiB"]
    for line in memory.lines[:2]:
        assert max(line.get_ydata()) == 5  # a layer, and what four rows save


def test_recompute_takes_the_place_of_the_backward_before() -> None:
    """Both happen at the same time, so there is no spike between them."""
    _, memory = drawn([Place(memory=2.5 * GIB)])

    sizes = list(memory.lines[0].get_ydata())
    # A layer; from the first recompute to the last backward what a row saves; a layer.
    assert [size for size, _ in groupby(sizes)] == [1, 2, 1]


def test_of_many_devices_the_range_is_drawn() -> None:
    _, memory = drawn([Place(memory=6 * GIB)] * 20)

    assert words(memory) == ["all devices", "the fullest device"]
    assert [text.get_text() for text in memory.texts] == ["limit: 6 GiB"]
    assert max(memory.lines[0].get_ydata()) == 5
