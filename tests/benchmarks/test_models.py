"""The models are those of the papers, by all published counts, and run the same as pipelines."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.models import amoebanetd, resnet101, unet
from lightning_gpipe import GPipe, balance_by_parameters
from lightning_gpipe.core.skip.skip_layout import verify_skippables
from tests.support.models import assert_same, step


def counts(build: Callable[[], nn.Sequential]) -> tuple[int, int]:
    with torch.device("meta"):
        model = build()
    return len(model), sum(parameter.numel() for parameter in model.parameters())


# Layers and parameters from Kim et al., "torchgpipe" (2020), and from its documentation.


@pytest.mark.parametrize(
    "blocks, channels, layers, parameters",
    [
        (5, 64, 241, 232_687_328),
        (6, 72, 285, 362_157_516),
        (11, 128, 505, 2_213_834_176),
        (24, 128, 1077, 4_993_859_008),
        (24, 160, 1077, 7_802_903_600),
        (48, 160, 2133, 15_822_206_000),
    ],
)
def test_counts_of_unet(blocks: int, channels: int, layers: int, parameters: int) -> None:
    assert counts(lambda: unet(blocks, channels)) == (layers, parameters)


@pytest.mark.parametrize(
    "normal_cells, filters, layers, parameters",
    [
        (18, 208, 24, 81_505_540),
        (18, 256, 24, 122_470_120),
        (18, 416, 24, 319_024_120),
        (18, 544, 24, 542_734_840),
        (36, 544, 42, 1_055_832_376),
        (72, 512, 78, 1_844_858_344),
    ],
)
def test_counts_of_amoebanetd(
    normal_cells: int, filters: int, layers: int, parameters: int
) -> None:
    assert counts(lambda: amoebanetd(normal_cells, filters)) == (layers, parameters)


def test_counts_of_resnet101() -> None:
    assert counts(resnet101) == (370, 44_549_160)


# Shapes, without memory.


@pytest.mark.parametrize(
    "build, image, output",
    [
        (lambda: unet(5, 64), (2, 3, 192, 192), (2, 1, 192, 192)),
        (lambda: unet(1, 2, inputs=1, outputs=4), (2, 1, 64, 96), (2, 4, 64, 96)),
        (lambda: amoebanetd(18, 208), (2, 3, 224, 224), (2, 1000)),
        (lambda: amoebanetd(18, 208), (2, 3, 331, 299), (2, 1000)),
        (resnet101, (2, 3, 224, 224), (2, 1000)),
    ],
)
def test_shapes(
    build: Callable[[], nn.Sequential], image: tuple[int, ...], output: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = build()
        verify_skippables(model)
        assert model(torch.empty(image)).shape == output


# As pipelines, the same numbers. The published depths, but narrow, so that all is in float64: to
# float32 a U-Net this deep is chaos, and two orders of the same sums differ in the second digit.


@pytest.mark.parametrize(
    "build, side",
    [
        (lambda: unet(5, 2), 64),
        (lambda: amoebanetd(18, 16, classes=5), 32),
        (lambda: resnet101(width=4, classes=5), 32),
    ],
    ids=["unet", "amoebanetd", "resnet101"],
)
def test_pipeline_of_four_stages(build: Callable[[], nn.Sequential], side: int) -> None:
    torch.manual_seed(1)
    module = build().double().eval()  # no dropout, and batch norms normalise as on one device
    images = torch.randn(3, 3, side, side, dtype=torch.float64, requires_grad=True)
    balance = balance_by_parameters(module, stages=4)
    pipeline = GPipe(copy.deepcopy(module), balance, devices=["cpu"] * 4, chunks=3)

    try:
        actual = step(pipeline, images)
    finally:
        pipeline.close()

    assert len(pipeline.stages) == 4
    assert_same(actual._asdict(), step(module, images)._asdict())
