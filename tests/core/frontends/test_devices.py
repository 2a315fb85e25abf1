"""Which GPUs a pipeline takes if it is not told."""

from __future__ import annotations

import pytest
import torch

from lightning_gpipe.core.frontends import choose_devices


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many GPUs are there."""
    number: int = request.param
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    return number


def number_chosen(stages: int) -> int:
    chosen = choose_devices(None, stages)
    assert chosen == [torch.device("cuda", k) for k in range(len(chosen))]
    return len(chosen)


@pytest.mark.parametrize("gpus", [4], indirect=True)
@pytest.mark.parametrize("stages, taken", [(1, 1), (2, 2), (4, 4), (6, 3), (8, 4), (9, 3)])
def test_as_many_gpus_as_divide_the_stages(gpus: int, stages: int, taken: int) -> None:
    assert number_chosen(stages) == taken


@pytest.mark.parametrize("gpus", [4], indirect=True)
def test_one_gpu_of_several_for_all_stages(gpus: int) -> None:
    with pytest.warns(UserWarning, match="all 7 stages share one GPU.* of the 4 GPUs divides 7"):
        assert number_chosen(7) == 1


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_one_gpu_is_there(gpus: int) -> None:
    assert number_chosen(7) == 1


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_no_gpu_is_there(gpus: int) -> None:
    assert choose_devices(None, 3) == [torch.device("cpu")] * 3
