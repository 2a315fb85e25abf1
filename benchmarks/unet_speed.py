"""Claim: U-Net (5, 64) in four stages is no slower than in torchgpipe, and takes no more memory.

Published for torchgpipe on four Tesla P40: images of 192 × 192, batches of 512 in 16 micro-batches,
balance [30, 66, 84, 61], binary cross-entropy. Here half of such a batch, in as many micro-batches;
`--batch 512` is the whole. How it is measured: see published.py.

    python -m benchmarks.unet_speed

Without a GPU it runs the layers of a narrow one on images of 64 × 64, and claims nothing.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import unet
from benchmarks.published import Experiment, Size, measure


def foreground(images: Tensor) -> Tensor:
    """A mask for each image: where its first channel is positive."""
    return (images[:, :1] > 0).to(images.dtype)


UNET = Experiment(
    title="U-Net (5, 64)",
    balance=[30, 66, 84, 61],
    full=Size(lambda: unet(5, 64), side=192, batch=256, chunks=16),
    small=Size(lambda: unet(5, 2), side=64, batch=8, chunks=4),
    loss=F.binary_cross_entropy_with_logits,
    target=foreground,
    stated="Published, on four P40: 67.0 samples/s with a batch of 512 in 16 micro-batches.",
)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    measure("unet_speed", __doc__, UNET, argv)


if __name__ == "__main__":
    main()
