"""Small language models in a LightningModule, and tokens to train them on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

TOKENS, LENGTH, WIDTH = 11, 6, 8


class Block(nn.Module):
    """Mixes each token with those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask @ self.linear(self.norm(x)).tanh()


class Looped(nn.Module):
    """Loops over blocks, around which an embedding and a head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = ids.size(1)
        mask = torch.ones(length, length, dtype=x.dtype, device=x.device).tril() / length
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Traced(nn.Module):
    """Calls its children as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = self.down(x).tanh()
        return self.up(self.middle(y).relu() + y)


def llama(**changed: Any) -> Any:
    """A Llama of transformers with a few thousand parameters.

    Args:
        changed: What else its configuration shall have.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
    options = {
        "vocab_size": TOKENS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "use_cache": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**options | changed))


def t5() -> nn.Module:
    """A T5 of transformers with a few thousand parameters and no dropout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import T5Config, T5ForConditionalGeneration
    config = T5Config(
        vocab_size=TOKENS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_decoder_layers=4,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "looped": Looped,
    "traced": Traced,
    "llama": llama,
    "t5": t5,
}


class LanguageModel(L.LightningModule):
    """A language model, its loss, and what it would say."""

    def __init__(self, kind: str = "looped") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = NETWORKS[kind]().double()

    def loss(self, ids: Tensor) -> Tensor:
        if self.hparams["kind"] in ("llama", "t5"):
            return self.net(input_ids=ids, labels=ids).loss
        return F.cross_entropy(self.net(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(ids)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Text(L.LightningDataModule):
    """20 rows to train on in batches of 7, 7 and 6; 9 to evaluate in batches of 5 and 4."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(20, seed=1), batch_size=7)  # type: ignore[arg-type]  # a tensor

    def val_dataloader(self) -> Any:
        return DataLoader(rows(9, seed=2), batch_size=5)  # type: ignore[arg-type]  # a tensor


def rows(count: int, seed: int) -> Tensor:
    """Rows of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TOKENS, (count, LENGTH), generator=generator)
