"""Which devices a pipeline runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import gcd

import torch

from lightning_gpipe.core.plan import check_even


def choose_devices(
    devices: Sequence[str | torch.device] | None, *stages: int
) -> list[torch.device]:
    """The device of each worker, for pipelines with these numbers of stages.

    Args:
        devices: As the user gave them; None takes as many GPUs as divide the numbers of stages, or
            without a GPU as many CPU threads as do. There is a warning if several GPUs are
            there and only one is taken.
        stages: The number of stages of each pipeline.

    Raises:
        ValueError: If the number of devices given does not divide the number of stages.
    """
    if devices is None:
        common = gcd(*stages)
        found = torch.cuda.device_count()
        used = max((k for k in range(1, found + 1) if common % k == 0), default=0)
        if used == 1 < min(*stages, found):
            _warn_of_one_gpu(stages, found)
        chosen = [torch.device("cuda", k) for k in range(used)]
        chosen = chosen or [torch.device("cpu")] * common
    else:
        chosen = [torch.device(device) for device in devices]
    for each in stages:
        check_even(
            each,
            len(chosen),
            f"The devices are {[str(device) for device in chosen]}. Give {each} devices, or a "
            "balance with another number of stages.",
        )
    return list(map(with_index, chosen))


def _warn_of_one_gpu(stages: Sequence[int], found: int) -> None:
    numbers = " and ".join(map(str, stages))
    warnings.warn(
        f"all {numbers} stages share one GPU, so nothing runs at the same time: no other "
        f"number of the {found} GPUs divides {numbers}. Cut the layers into {found} stages, "
        "or a multiple of that, or give a device for each stage.",
        stacklevel=4,  # where a GPipe is made
    )


def with_index(device: torch.device) -> torch.device:
    """The device with the index that ``tensor.device`` has."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
