"""How the tensors of GPUs go to other processes: straight, or over the memory of the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair

# Of each value with a tensor of a GPU that was sent to one process: the GPUs, or None over a host.
Ways = list[GpuPair | None]

needs_nccl = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ and not dist.is_nccl_available(),
    reason="needs NCCL, or simulated GPUs",
)


@contextmanager
def recorded_ways() -> Iterator[Ways]:
    """A ``with`` block that records the ways of what this process sends in it."""
    ways: Ways = []
    post, post_announced = Links.post, Links.post_announced

    def record(links: Links, rank: int, header: Header, mail: Mail, ahead: Any = ()) -> None:
        if any(mail.on_device):
            ways.append(mail.gpus)
        post(links, rank, header, mail, ahead)

    def record_announced(links: Links, rank: int, gpus: GpuPair, content: Tensor) -> None:
        ways.append(gpus)
        post_announced(links, rank, gpus, content)

    with (
        patch.object(Links, "post", record),
        patch.object(Links, "post_announced", record_announced),
    ):
        yield ways
