"""Which devices a pipeline takes."""

from __future__ import annotations

import pytest
import torch

from lightning_gpipe.core.frontends import choose_devices


@pytest.mark.parametrize(
    "found, stages, chosen",
    [(2, 4, 2), (4, 4, 4), (8, 4, 4), (3, 4, 2), (4, 6, 3), (4, 9, 3), (4, 1, 1), (1, 7, 1)],
)
def test_gpus_by_default(
    found: int, stages: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once 6 stages on a machine with 4 GPUs were an error, although no device was asked for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)

    assert choose_devices(None, stages) == [torch.device("cuda", k) for k in range(chosen)]


def test_one_gpu_of_several_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    with pytest.warns(UserWarning, match="all 7 stages share one GPU.* of the 4 GPUs divides 7"):
        assert choose_devices(None, 7) == [torch.device("cuda", 0)]


def test_no_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert choose_devices(None, 3) == [torch.device("cpu")] * 3


def test_devices_that_do_not_divide_the_stages() -> None:
    with pytest.raises(ValueError, match=r"3 devices. The devices are \['cuda:0', 'cuda:1',"):
        choose_devices(["cuda:0", "cuda:1", "cuda:2"], 4)
