"""ResNet-101 as 370 layers: each bottleneck is eleven, with a skip connection around nine of them.

::

    enter ─ 1x1 ─ norm ─ relu ─ 3x3 ─ norm ─ relu ─ 1x1 ─ norm ─ leave ─ relu
      └───────────────────── stash, pop ─────────────────────────┘

A pipeline can be cut anywhere, within bottlenecks too, and the balance is as fine as can be. Where
a bottleneck changes the shape, the layer that pops brings the tensor into the new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_gpipe.core.skip.declare import Namespace, with_skips

STAGES = (3, 4, 23, 3)  # He et al., table 1: the bottlenecks of conv2_x to conv5_x
EXPANSION = 4


def resnet101(*, classes: int = 1000, width: int = 64) -> nn.Sequential:
    """ResNet-101 for images of three channels.

    Args:
        classes: The number of classes.
        width: The channels of the first layer; 64 in the paper.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = width
    for k, bottlenecks in enumerate(STAGES):
        inside = width * 2**k
        for index in range(bottlenecks):
            layers += bottleneck(inputs, inside, stride=2 if k and not index else 1)
            inputs = EXPANSION * inside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)


def bottleneck(inputs: int, inside: int, *, stride: int) -> Iterator[nn.Module]:
    """Eleven layers from ``inputs`` channels to four times ``inside``."""
    outputs, namespace = EXPANSION * inside, Namespace()
    yield Enter().isolate(namespace)  # type: ignore[operator]  # by @with_skips
    yield nn.Conv2d(inputs, inside, 1, bias=False)
    yield nn.BatchNorm2d(inside)
    yield nn.ReLU()
    yield nn.Conv2d(inside, inside, 3, stride=stride, padding=1, bias=False)
    yield nn.BatchNorm2d(inside)
    yield nn.ReLU()
    yield nn.Conv2d(inside, outputs, 1, bias=False)
    yield nn.BatchNorm2d(outputs)
    yield Leave(inputs, outputs, stride).isolate(namespace)  # type: ignore[operator]  # by @with_skips
    yield nn.ReLU()


@with_skips(stash=["identity"])
class Enter(nn.Module):
    """Keeps the input of a bottleneck."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"identity": x}


@with_skips(pop=["identity"])
class Leave(nn.Module):
    """Adds the input of the bottleneck, in the shape of its output."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor, identity: Tensor) -> Tensor:
        return x + self.downsample(identity)
