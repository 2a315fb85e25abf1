"""A small decoder as Llama's are: its forward loops over the blocks in an nn.ModuleList."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_gpipe import whole


class Llama(nn.Module):
    """Token embeddings, blocks with rotary embeddings, and a head.

    Args:
        blocks: The number of blocks.
        width: The width of the activations.
        heads: The number of attention heads.
        tokens: The size of the vocabulary.
    """

    def __init__(self, blocks: int, width: int, heads: int, *, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        half = width // heads // 2
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(half) / half))
        self.frequencies: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for every next token, of shape (batch, time, tokens)."""
        angles = torch.arange(tokens.size(1), device=tokens.device)[:, None] * self.frequencies
        rotary = whole(angles.cos()), whole(angles.sin())
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotary=rotary)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal attention and a gated feed-forward net, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 8 * width // 3
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Map activations of shape (batch, time, width) to the same shape."""
        projected = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.transpose(1, 3).unbind(2)
        q, k = turned(q, *rotary), turned(k, *rotary)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embeddings: pairs of channels turned by their angles."""
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)
