"""Claim: AmoebaNet-D (18, 256) in four stages is no slower than in torchgpipe, and no larger.

Published for torchgpipe on four Tesla P40: images of 224 × 224, batches of 1152 in 32
micro-batches, balance [3, 6, 7, 8]. Here a quarter of such a batch, in as many micro-batches;
`--batch 1152` is the whole. How it is measured: see published.py. Batch norms update their
statistics by micro-batch, in theirs as in ours; deferring them, our default, has a row of its own.

    python -m benchmarks.amoebanet_speed

Without a GPU it runs the layers of a narrow one on images of 64 × 64, and claims nothing.
"""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.models import amoebanetd
from benchmarks.published import Experiment, Size, classes_of, measure

AMOEBANET = Experiment(
    title="AmoebaNet-D (18, 256)",
    balance=[3, 6, 7, 8],
    full=Size(lambda: amoebanetd(18, 256), side=224, batch=288, chunks=32),
    small=Size(lambda: amoebanetd(18, 16, classes=10), side=64, batch=8, chunks=2),
    loss=F.cross_entropy,
    target=classes_of,
    stated="Published, on four P40: 72.4 samples/s with a batch of 1152 in 32 micro-batches.",
    deferred=True,
)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    measure("amoebanet_speed", __doc__, AMOEBANET, argv)


if __name__ == "__main__":
    main()
