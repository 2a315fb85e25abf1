"""Models of a guide to GPipe, narrower: what a newcomer tries first.

A model whose layers are in one nn.Sequential, a transformer with its blocks in one, between an
embedding and a head, and a U-Net whose forward adds what it kept from the way down.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.case import ROWS, Case

_TOKENS = 32


class LargeModel(nn.Module):
    """So many linear layers."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    """Attention and a perceptron, a norm after each."""

    def __init__(self, width: int, heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=batch_first)
        self.norm1 = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.norm1(x + attended)
        return self.norm2(x + self.ffn(x))


class GPipeTransformer(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, depth: int, width: int, heads: int, *, batch_first: bool) -> None:
        super().__init__()
        blocks = (Block(width, heads, batch_first=batch_first) for _ in range(depth))
        self.embedding = nn.Embedding(_TOKENS, width)
        self.transformer_blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, _TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = self.transformer_blocks(x)
        return self.fc(x)


class DoubleConv(nn.Module):
    """Two convolutions, each with a norm and in-place ReLU."""

    def __init__(self, channels: int, more: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(channels, more, kernel_size=3, padding=1),
            nn.BatchNorm2d(more),
            nn.ReLU(inplace=True),
            nn.Conv2d(more, more, kernel_size=3, padding=1),
            nn.BatchNorm2d(more),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class GPipeUNet(nn.Module):
    """Four times down and up again, with additions across."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = _down(width)
        self.down2 = _down(2 * width)
        self.down3 = _down(4 * width)
        self.down4 = _down(8 * width)
        self.up1 = _up(16 * width)
        self.up2 = _up(8 * width)
        self.up3 = _up(4 * width)
        self.up4 = _up(2 * width)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x5 = self.down4(x4)
        x = self.up1(x5) + x4
        x = self.up2(x) + x3
        x = self.up3(x) + x2
        x = self.up4(x) + x1
        return self.outc(x)


def _down(channels: int) -> nn.Module:
    return nn.Sequential(nn.MaxPool2d(2), DoubleConv(channels, 2 * channels))


def _up(channels: int) -> nn.Module:
    return nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2)


def _vectors(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 16, generator=generator)}


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randint(_TOKENS, (ROWS, 11), generator=generator)}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 3, 32, 32, generator=generator)}


CASES = [
    Case("LargeModel", lambda: LargeModel(20, 16), _vectors, "layers", dtype=torch.float64),
    Case(
        "GPipeTransformer (batch_first=True)",
        lambda: GPipeTransformer(8, 16, 2, batch_first=True),
        _tokens,
        "transformer_blocks",
        dtype=torch.float64,
    ),
    Case(
        "GPipeTransformer",
        lambda: GPipeTransformer(8, 16, 2, batch_first=False),
        _tokens,
        "transformer_blocks",
        refused="mix|rows",
        dtype=torch.float64,
    ),
    Case("GPipeUNet", lambda: GPipeUNet(3, 5, 4), _images, dtype=torch.float64, mixes=True),
]
