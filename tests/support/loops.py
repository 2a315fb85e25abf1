"""Models whose forward loops over blocks, written as people write them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpipe.core.frontends.frontend import RunProgram
from lightning_gpipe.core.frontends.module_list.loop import Loop
from tests.support.interpreter import Interpreter
from tests.support.pipes import even

WIDTH, HEADS, TOKENS, LENGTH = 8, 2, 11, 5


@contextmanager
def looped(
    model: nn.Module, path: str = "blocks", *, stages: int = 2, run: RunProgram | None = None
) -> Iterator[Loop]:
    """The model with its blocks in stages, until the end of a ``with`` block."""
    loop = Loop(model, path)
    loop.partitions(even(len(loop.units), stages))
    loop.install(run or Interpreter())
    try:
        yield loop
    finally:
        loop.remove()


class Attention(nn.Module):
    """Attention of ``x`` to ``memory``, with a mask and rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            layer(each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, each in zip(self.qkv, (x, memory, memory), strict=True)
        )
        if rotary is not None:
            q, k = (_rotated(each, *rotary) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    turned = torch.cat([-other, one], -1)
    return x * cos[:, None] + turned * sin[:, None]


class Block(nn.Module):
    """A block of a decoder; returns a tensor."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        x = x + self.attention(self.norm(x), mask=attention_mask, rotary=rotary)
        return x + self.mlp(x)


class GPT(nn.Module):
    """A decoder with padding, a causal mask and rotary embeddings."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()

    def forward(self, tokens: Tensor, hidden_states: bool = False) -> Any:
        x = self.embedding(tokens)
        length = tokens.size(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & (tokens > 0)[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        rotary = self._rotary(torch.arange(length)[None].expand(tokens.size(0), -1))
        states = [x]
        for block in self.blocks:
            x = block(x, attention_mask=mask, rotary=rotary)
            states.append(x)
        logits = self.head(x)
        return (logits, states) if hidden_states else logits

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = WIDTH // HEADS // 2
        frequencies = torch.exp(-math.log(100.0) / half * torch.arange(half))
        angles = (positions[..., None] * frequencies).repeat(1, 1, 2) * self.scale
        return angles.cos(), angles.sin()


def tokens(rows: int = 7, length: int = LENGTH, *, seed: int = 3) -> Tensor:
    """Rows of tokens; some end with padding, which is 0."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(1, TOKENS, (rows, length), generator=generator)
    found[::2, -1] = 0
    return found


class Around(nn.Module):
    """A loop over linear blocks, with what a test wants to do between them.

    Args:
        between: Called with the index of the next block and what it is about to get.
        block: Makes a block.
        depth: The number of blocks.
    """

    def __init__(
        self,
        between: Callable[[int, Any], Any] = lambda k, x: x,
        block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH),
        depth: int = 4,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.between = between
        self.double()

    def forward(self, x: Any, **kwargs: Any) -> Any:
        for k, block in enumerate(self.blocks):
            x = block(self.between(k, x), **kwargs)
        return x


def states(rows: int = 7, length: int = LENGTH, *, seed: int = 5) -> Tensor:
    """Rows of hidden states that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return made.requires_grad_()
