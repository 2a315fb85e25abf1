r"""A transformer of 100 billion parameters, on the meta device, to be planned and not to be run.

python -m lightning_gpipe plan --model benchmarks.models.billions.Billions \
        --trainer.strategy gpipe --devices 1024 --device-memory 80GiB --device-speed 312TFLOPS \
        --schedule 1f1b
"""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a skip connection.

    Args:
        width: The features of a token.
        heads: The heads of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        attend, think = self.norms
        q, k, v = self.qkv(attend(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(think(x))))


class Billions(L.LightningModule):
    """As many blocks as stages, but for the embedding and the head.

    Args:
        blocks: Their number.
        width: The features of a token.
        rows: The number of texts in a mini-batch.
    """

    def __init__(self, blocks: int = 1022, width: int = 2880, rows: int = 1024) -> None:
        super().__init__()
        self.blocks, self.width, self.vocabulary = blocks, width, 32_000
        self.layers = nn.Sequential()
        self.example_input_array = torch.zeros(rows, 2048, dtype=torch.long, device="meta")

    def configure_model(self) -> None:
        if len(self.layers):
            return
        with torch.device("meta"):
            self.layers = nn.Sequential(
                nn.Embedding(self.vocabulary, self.width),
                *(Block(self.width, self.width // 144) for _ in range(self.blocks)),
                nn.Linear(self.width, self.vocabulary),
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(1, 8, dtype=torch.long),) * 2]
