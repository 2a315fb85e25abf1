"""U-Net (B, C): five scales down and up, with B convolutions per scale and C channels in the first.

A scale stashes its output and halves the resolution; on the way up the tensor is popped and joined
to what comes from below::

    C      in ─ blocks ─┬──────────────── stash, pop ────────────────┬─ blocks ─ out      C/2
    2C                  └ ½ ─ blocks ─┬────────────────┬─ blocks ─ 2 ┘                    C
    ...                               └ ½ ─  ...  ─  2 ┘                                  ...
    16C

The lowest of the eleven runs of blocks is 32C channels wide inside, and 16C at its end. On the way
up each run halves the channels of the scale that it is on: its inputs are twice as many channels as
the scale has, its outputs half as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_gpipe.core.skip.declare import Namespace, with_skips

DEPTH = 5


def unet(blocks: int, channels: int, *, inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    """U-Net (B, C) for images of ``inputs`` channels, as 44 B + 21 layers.

    Args:
        blocks: B, the number of convolutions in each of the eleven runs.
        channels: C, the channels of the first scale; an even number.
        inputs: The channels of the images.
        outputs: The channels of what comes out, in the resolution of the images.

    The sides of the images must be multiples of 32, and at least 64 to be normalised at the bottom.
    """
    scales = [channels * 2**k for k in range(DEPTH)]
    namespaces = [Namespace() for _ in scales]
    layers: list[nn.Module] = []
    width = inputs
    for scale, namespace in zip(scales, namespaces, strict=True):
        layers += run([width, *[scale] * blocks])
        layers += [Enter().isolate(namespace), nn.MaxPool2d(2)]  # type: ignore[operator]  # by @with_skips
        width = scale
    layers += run([width, *[2 * width] * (blocks - 1), width])
    for scale, namespace in zip(reversed(scales), reversed(namespaces), strict=True):
        layers += [nn.Upsample(scale_factor=2), Leave().isolate(namespace)]  # type: ignore[operator]  # by @with_skips
        layers += run([2 * scale, *[scale // 2] * blocks])
    layers.append(nn.Conv2d(channels // 2, outputs, 1, bias=False))
    return nn.Sequential(*layers)


def run(widths: list[int]) -> Iterator[nn.Module]:
    """Convolutions from each width to the next, four layers for each."""
    for before, after in pairwise(widths):
        yield nn.Conv2d(before, after, 3, padding=1, bias=False)
        yield nn.Dropout2d(0.1)
        yield nn.InstanceNorm2d(after)
        yield nn.LeakyReLU(0.01)


@with_skips(stash=["skip"])
class Enter(nn.Module):
    """Keeps a tensor for the same scale on the way up."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"skip": x}


@with_skips(pop=["skip"])
class Leave(nn.Module):
    """Joins the kept tensor to the channels that come from below."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([skip, x], dim=1)
