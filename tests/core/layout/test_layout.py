from textwrap import dedent

import pytest
import torch
from torch import nn

from lightning_gpipe.core.layout.layout import Layout, lay_out
from lightning_gpipe.core.layout.partition import check_even, cut
from lightning_gpipe.core.programs.route import Route, SkipName
from lightning_gpipe.core.schedules.placement import looped

CPU, META = torch.device("cpu"), torch.device("meta")
X = SkipName(None, "x")


def tied() -> nn.Sequential:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    module[3].weight = module[0].weight
    return module


@pytest.fixture
def layout() -> Layout:
    return lay_out(cut(tied(), [1, 2, 1]), [CPU, META, META], [Route(X, 0, 2)])


def test_placements() -> None:
    assert looped(3, 3) == (0, 1, 2)
    assert looped(6, 2) == (0, 1, 0, 1, 0, 1)


def test_layout_prints_what_runs_where(layout: Layout) -> None:
    assert str(layout) == dedent("""\
        stage 0 | worker 0 | cpu | layer 0 | sends 'x' to stage 2
        stage 1 | worker 1 | meta | layers 1..2
        stage 2 | worker 2 | meta | layer 3 | follows 1 parameter of cpu""")


def test_devices_and_stages_by_placement() -> None:
    layout = lay_out(cut(tied(), [1, 1, 1, 1]), [CPU, META])

    assert [layout.device_of(j) for j in range(layout.n)] == [CPU, META, CPU, META]
    assert [layout.stages_of(worker) for worker in range(2)] == [[0, 2], [1, 3]]


def test_skips_at_both_ends(layout: Layout) -> None:
    assert [len(layout.leaving(j)) for j in range(3)] == [1, 0, 0]
    assert [len(layout.arriving(j)) for j in range(3)] == [0, 0, 1]


def test_parameter_can_be_given_another_home(layout: Layout) -> None:
    weight = layout.partitions[0].layers[0].get_parameter("weight")

    moved = layout.with_homes({weight: META})

    assert (layout.homes[weight], moved.homes[weight]) == (CPU, META)


@pytest.mark.parametrize("devices", [0, 2, 4])
def test_devices_that_do_not_divide_the_stages(devices: int) -> None:
    with pytest.raises(ValueError, match=f"got 3 stages for {devices} devices. Do this."):
        check_even(3, devices, "Do this.")
