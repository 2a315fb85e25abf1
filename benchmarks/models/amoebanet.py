"""AmoebaNet-D (L, D): an image classifier found by evolution, with L cells of D filters or more.

Every cell looks at the outputs of the two cells before it. So between layers goes a pair: the
latest output and the one before. Reduction cells halve the resolution and double the filters: two
come before the L normal cells, and one after each third of these but the last::

    stem  R  R  N N N ... N  R  N N N ... N  R  N N N ... N  classify
    D/4  D/2 D  D           2D 2D           4D 4D

The two genotypes are those of ``amoeba_net_d`` in the code that accompanies the paper
(github.com/tensorflow/tpu, models/official/amoeba_net); without its auxiliary head and drop path,
which the pipeline papers leave out too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

States = tuple[Tensor, Tensor]


def amoebanetd(layers: int, filters: int, *, classes: int = 1000) -> nn.Sequential:
    """AmoebaNet-D (L, D) for images of three channels, as L + 6 layers.

    Args:
        layers: L, the number of normal cells; a multiple of 3.
        filters: D, the filters of the first normal cells; a multiple of 16.
        classes: The number of classes.
    """
    width = filters // 4
    cells: list[nn.Module] = [Stem(width)]
    inputs, before, halved = width, width, False

    def add(genotype: Genotype) -> None:
        nonlocal inputs, before, halved
        cell = Cell(genotype, inputs, before, width, halved=halved)
        cells.append(cell)
        inputs, before, halved = cell.outputs, inputs, genotype.stride == 2

    width *= 2
    add(REDUCTION)
    for _ in range(3):
        width *= 2
        add(REDUCTION)
        for _ in range(layers // 3):
            add(NORMAL)
    cells.append(Classify(inputs, classes))
    return nn.Sequential(*cells)


# What a genotype is made of: operations on tensors of so many channels, which they keep. The order
# within is relu, convolution, norm.


def convolution(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> list[nn.Module]:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def none(channels: int, stride: int) -> nn.Module:
    return nn.Identity()


def max_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*convolution(channels, channels, stride=(stride, stride)))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        *convolution(channels, inside),
        *convolution(inside, inside, (3, 3), (stride, stride)),
        *convolution(inside, channels),
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inside = channels // 4
    return nn.Sequential(
        *convolution(channels, inside),
        *convolution(inside, inside, (1, 7), (1, stride)),
        *convolution(inside, inside, (7, 1), (stride, 1)),
        *convolution(inside, channels),
    )


class Genotype(NamedTuple):
    """What a cell computes.

    States 0 and 1 are the outputs of the two cells before, the latest first. Each pair of genes
    makes one state more, the sum of two operations on earlier states.
    """

    genes: list[tuple[int, Callable[[int, int], nn.Module]]]
    output: list[int]
    """The states that are joined to make the cell's output."""
    stride: int


NORMAL = Genotype(
    [
        (1, conv_1x1),
        (1, max_3x3),
        (1, none),
        (0, conv_1x7_7x1),
        (0, conv_1x1),
        (0, conv_1x7_7x1),
        (2, max_3x3),
        (2, none),
        (1, average_3x3),
        (5, conv_1x1),
    ],
    output=[0, 3, 4, 6],
    stride=1,
)
REDUCTION = Genotype(
    [
        (0, max_2x2),
        (0, max_3x3),
        (2, none),
        (1, conv_3x3),
        (2, conv_1x7_7x1),
        (2, max_3x3),
        (3, none),
        (1, max_2x2),
        (2, average_3x3),
        (3, conv_1x1),
    ],
    output=[4, 5, 6],
    stride=2,
)


class Stem(nn.Module):
    """Halves the image, and makes the first pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: Tensor) -> States:
        x = self.norm(self.conv(image))
        return x, x


class Cell(nn.Module):
    """One cell of ``width`` filters.

    Args:
        genotype: What it computes.
        inputs: The channels of the latest output.
        before: The channels of the output before.
        width: The filters of each state.
        halved: Whether the latest output has half the resolution of the one before.
    """

    def __init__(
        self, genotype: Genotype, inputs: int, before: int, width: int, *, halved: bool
    ) -> None:
        super().__init__()
        self.outputs = width * len(genotype.output)
        self.enter = nn.Sequential(*convolution(inputs, width))
        self.enter_before = (
            Halve(before, width) if halved else nn.Sequential(*convolution(before, width))
        )
        self.operations = nn.ModuleList(
            operation(width, genotype.stride if state < 2 else 1)
            for state, operation in genotype.genes
        )
        self._states = [state for state, _ in genotype.genes]
        self._output = genotype.output

    def forward(self, latest_and_before: States) -> States:
        latest, before = latest_and_before
        states = [self.enter(latest), self.enter_before(before)]
        done = [
            (state, operation)
            for state, operation in zip(self._states, self.operations, strict=True)
        ]
        for (i, left), (j, right) in zip(done[::2], done[1::2], strict=True):
            states.append(left(states[i]) + right(states[j]))
        return torch.cat([states[k] for k in self._output], dim=1), latest


class Halve(nn.Module):
    """Halves the resolution by two 1x1 convolutions: of the even pixels, and of the odd."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


class Classify(nn.Module):
    """The classes of the latest output."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)

    def forward(self, latest_and_before: States) -> Tensor:
        latest, _ = latest_and_before
        return self.linear(F.relu(latest).mean(dim=(2, 3)))
