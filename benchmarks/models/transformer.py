"""A transformer of equal blocks: what is cut in the middle has two halves that cost the same."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def transformer(blocks: int, width: int, *, heads: int | None = None) -> nn.Sequential:
    """Blocks on activations of shape (batch, time, width), one layer each.

    Args:
        blocks: The number of blocks.
        width: The width of the activations.
        heads: The number of attention heads; by default one for every 64 of the width.
    """
    return nn.Sequential(*(Block(width, heads or max(1, width // 64)) for _ in range(blocks)))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, time, width) to the same shape."""
        b, t, w = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))
