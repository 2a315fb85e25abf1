"""Which devices a pipeline runs on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from lightning_gpipe.core.plan import check_even


def choose_devices(devices: Sequence[str | torch.device] | None, stages: int) -> list[torch.device]:
    """The device of each worker, for a pipeline with this number of stages.

    Args:
        devices: As the user gave them; None takes as many GPUs as divide the number of stages, or
            without a GPU one CPU thread for each stage. There is a warning if several GPUs are
            there and only one is taken.
        stages: The number of stages.

    Raises:
        ValueError: If the number of devices given does not divide the number of stages.
    """
    if devices is None:
        found = torch.cuda.device_count()
        used = max((k for k in range(1, found + 1) if stages % k == 0), default=0)
        if used == 1 < min(stages, found):
            warnings.warn(
                f"all {stages} stages share one GPU, so nothing runs at the same time: no other "
                f"number of the {found} GPUs divides {stages}. Cut the layers into {found} stages, "
                "or a multiple of that, or give a device for each stage.",
                stacklevel=4,  # where a GPipe is made
            )
        chosen = [torch.device("cuda", k) for k in range(used)]
        chosen = chosen or [torch.device("cpu")] * stages
    else:
        chosen = [torch.device(device) for device in devices]
    check_even(
        stages,
        len(chosen),
        f"The devices are {[str(device) for device in chosen]}. Give {stages} devices, or a "
        "balance with another number of stages.",
    )
    return list(map(with_index, chosen))


def with_index(device: torch.device) -> torch.device:
    """The device with the index that ``tensor.device`` has."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
