"""A character language model of the Python language reference, trained as a pipeline.

`CharLM` is an ordinary LightningModule and `TopicsData` an ordinary LightningDataModule. One
argument of the Trainer, in `main`, makes the training a pipeline. The layers to spread over devices
are the children of one `nn.Sequential`.

The text ships with every CPython (`pydoc_data.topics`), so nothing is downloaded. The final report
compares the validation loss with that of a unigram model, which only knows the frequency of each
character. It also shows the speed, and the loss of the saved checkpoint in a plain Trainer on one
device.

    python -m examples.char_lm                      # 2 stages on 2 CPU cores, about 3 minutes
    python -m examples.char_lm --plain              # the same model on one device, no pipeline
    python -m examples.char_lm --accelerator gpu --devices 4 --size gpt2-small
"""

from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
ALPHABET = "".join(sorted(set(TEXT)))

Batch = tuple[Tensor, Tensor]  # codes of characters, and of the character after each


def split(text: str) -> tuple[str, str]:
    """Split `text` into training text and validation text, the last tenth.

    The reference repeats itself, so paragraphs of the validation text are removed from the
    training text.
    """
    cut = round(0.9 * len(text))
    training, validation = text[:cut].split("\n\n"), text[cut:]
    held_out = set(validation.split("\n\n"))
    return "\n\n".join(paragraph for paragraph in training if paragraph not in held_out), validation


def encode(text: str) -> Tensor:
    """Return the index of each character of `text` in `ALPHABET`."""
    place = {character: code for code, character in enumerate(ALPHABET)}
    return torch.tensor([place[character] for character in text])


def unigram_loss(training: Tensor, validation: Tensor, codes: int = len(ALPHABET)) -> float:
    """Return the loss, in nats, of predicting each of `codes` by its frequency in training."""
    counts = torch.bincount(training, minlength=codes) + 1  # no frequency is 0
    return -(counts / counts.sum()).log()[validation].mean().item()


def windows(codes: Tensor, context: int, stride: int) -> TensorDataset:
    """Return windows of `context` characters, one every `stride`, and the same shifted by one."""
    pieces = codes.unfold(0, context + 1, stride)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


class TopicsData(L.LightningDataModule):
    """The language reference, in windows of `context` characters.

    Training windows may begin anywhere: an epoch draws `training_windows` of them, or with None
    each one once. Validation windows do not overlap.
    """

    def __init__(
        self, context: int = 128, batch_size: int = 32, training_windows: int | None = None
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.training_windows = training_windows

    def setup(self, stage: str) -> None:
        self.training, self.validation = map(encode, split(TEXT))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        dataset = windows(self.training, self.context, stride=1)
        sampler = RandomSampler(dataset, num_samples=self.training_windows)
        return DataLoader(dataset, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(windows(self.validation, self.context, self.context), self.batch_size)


class Embedding(nn.Module):
    """The first layer: a learned vector for each character, plus one for its position."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Embedding(context, width)
        for embedding in (self.character, self.position):  # nn.Embedding's std=1 learns slowly
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.character(x) + self.position.weight[: x.size(1)]


class Block(nn.Module):
    """A middle layer: causal self-attention and a feed-forward net, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, time, 3 * width) -> three times (batch, heads, time, width / heads)
        projected = self.project_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project_out(attended.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.feed_forward_norm(x))))


class Head(nn.Sequential):
    """The last layer: the logits of the next character."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))


class CharLM(L.LightningModule):
    """A decoder-only transformer with a context of `context` characters."""

    def __init__(
        self,
        context: int = 128,
        blocks: int = 4,
        width: int = 128,
        heads: int = 4,
        learning_rate: float = 6e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.context = context
        self.learning_rate = learning_rate
        middle = (Block(width, heads) for _ in range(blocks))
        self.layers = nn.Sequential(Embedding(context, width), *middle, Head(width))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch, "train_loss")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.loss(batch, "val_loss")

    def loss(self, batch: Batch, name: str) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x).flatten(0, 1), y.flatten())
        self.log(name, loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = AdamW(groups, self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(
            optimizer, self.learning_rate, steps, pct_start=0.07, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.inference_mode()
    def generate(self, prompt: str, characters: int, temperature: float = 0.7) -> str:
        """Return `prompt` and `characters` more, each sampled from the model's logits."""
        codes = encode(prompt).to(self.device)
        for _ in range(characters):
            scores = self.layers(codes[None, -self.context :])[0, -1]
            codes = torch.cat([codes, (scores / temperature).softmax(dim=0).multinomial(1)])
        return "".join(ALPHABET[code] for code in codes.tolist())


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"context": 32, "blocks": 2, "width": 32, "heads": 2, "learning_rate": 1e-2},
    "demo": {"context": 128, "blocks": 4, "width": 128, "heads": 4, "learning_rate": 6e-3},
    "gpt2-small": {"context": 256, "blocks": 12, "width": 768, "heads": 12, "learning_rate": 6e-4},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, and report."""
    parser = options_parser(__doc__, output="runs/char_lm", batch_size=32, steps=600)
    parser.add_argument("--size", choices=SIZES, default="demo", help="of the model")
    options = start(parser, arguments)

    model = CharLM(**SIZES[options.size])
    data = TopicsData(model.context, options.batch_size, options.steps * options.batch_size)

    # The pipeline. With the Trainer's default, strategy="auto", the same training is a plain one.
    strategy = GPipeStrategy(options.balance, options.chunks, activation_checkpointing="never")

    best, measurements = ModelCheckpoint(filename="best", monitor="val_loss"), Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1,
        val_check_interval=min(100, options.steps),
        gradient_clip_val=1.0,
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    guess = {"val_loss": unigram_loss(data.training, data.validation)}
    cost = measurements.cost("characters", options.batch_size * model.context)
    reloaded = report(trainer, model, data, best, guess, cost)
    print(f"A sample:\n\n{reloaded.generate('The ', 200)}")


if __name__ == "__main__":
    main()
