"""Claim: ResNet-101 as 370 layers in four stages is no slower than in torchgpipe, and no larger.

Published for torchgpipe on four Tesla P40: images of 224 × 224, batches of 5632 in 256
micro-batches, balance [44, 92, 124, 110]. Here an eighth of such a batch in an eighth as many
micro-batches, each as large as published: many layers for little work each. `--batch 5632 --chunks
256` is the whole. How it is measured: see published.py. Batch norms update their statistics by
micro-batch, in theirs as in ours; deferring them, our default, has a row of its own.

    python -m benchmarks.resnet_speed

Without a GPU it runs the layers of a narrow one on images of 64 × 64, and claims nothing.
"""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.models import resnet101
from benchmarks.published import Experiment, Size, classes_of, measure

RESNET = Experiment(
    title="ResNet-101",
    balance=[44, 92, 124, 110],
    full=Size(resnet101, side=224, batch=704, chunks=32),
    small=Size(lambda: resnet101(width=4, classes=10), side=64, batch=8, chunks=2),
    loss=F.cross_entropy,
    target=classes_of,
    stated="Published, on four P40: 266.0 samples/s with a batch of 5632 in 256 micro-batches.",
    deferred=True,
)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    measure("resnet_speed", __doc__, RESNET, argv)


if __name__ == "__main__":
    main()
