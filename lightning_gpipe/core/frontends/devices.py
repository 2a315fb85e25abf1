"""The devices of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import gcd

import torch

from lightning_gpipe.core.schedules import check_even


def choose_devices(
    devices: Sequence[str | torch.device] | None, *stages: int
) -> list[torch.device]:
    """Return the device of each worker, for pipelines with these numbers of stages.

    Args:
        devices: The user's devices. None chooses as many GPUs as divide the numbers of stages, or
            without a GPU as many CPU threads, and warns if it uses one of several GPUs.
        stages: The number of stages of each pipeline.

    Raises:
        ValueError: If the number of devices does not divide the number of stages.
    """
    if devices is None:
        common = gcd(*stages)
        gpus = torch.cuda.device_count()
        used = max((k for k in range(1, gpus + 1) if common % k == 0), default=0)
        if used == 1 < min(*stages, gpus):
            numbers = " and ".join(map(str, stages))
            warnings.warn(
                f"all {numbers} stages share one GPU, so nothing runs at the same time: no other "
                f"number of the {gpus} GPUs divides {numbers}. Cut the layers into {gpus} stages, "
                "or a multiple of that, or give a device for each stage.",
                stacklevel=3,  # where a GPipe is made
            )
        chosen = [torch.device("cuda", k) for k in range(used)]
        chosen = chosen or [torch.device("cpu")] * common
    else:
        chosen = [torch.device(device) for device in devices]
    for n in stages:
        check_even(
            n,
            len(chosen),
            f"The devices are {[str(device) for device in chosen]}. Give {n} devices, or a "
            "balance with another number of stages.",
        )
    return list(map(with_index, chosen))


def with_index(device: torch.device) -> torch.device:
    """Return the device with the index that ``tensor.device`` has."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
