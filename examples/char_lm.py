"""A character language model of the Python language reference, trained as a pipeline.

`CharLM` is an ordinary LightningModule and `TopicsData` an ordinary LightningDataModule. Neither
knows of pipelines: what makes the run a pipeline is one argument of the Trainer, in `train`, and
`--plain` leaves it out. All that is asked of the model is that the layers worth spreading over
devices are the children of one `nn.Sequential`.

The text is the language reference that ships with every CPython (`pydoc_data.topics`), so there is
nothing to download. Real text keeps the example honest: a model that learns nothing but how
frequent each character is stays at the unigram loss, and the report at the end prints the two
losses side by side, with what the pipeline cost, and with a plain Trainer's verdict on the
checkpoint.

    python examples/char_lm.py                        # 2 stages on 2 CPU cores, about 3 minutes
    python examples/char_lm.py --plain                # the same model on one device, no pipeline
    python examples/char_lm.py --accelerator gpu --devices 4 --size gpt2-small
"""

import argparse
import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchmetrics.text import Perplexity
from typing_extensions import override

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.core.run.timeline import Timeline

TEXT = "\n\n".join(topics[name] for name in sorted(topics))
ALPHABET = "".join(sorted(set(TEXT)))

Batch = tuple[Tensor, Tensor]


# The text


def split(text: str, share: float = 0.1) -> tuple[str, str]:
    """Cut `text` into training text and validation text, which is the last `share` of it.

    One cut leaves a single border across which neighbours could tell of each other. Yet it would
    still leak: the reference repeats itself (the `with` statement is a topic of its own, and a
    section of *Compound statements*), and of its last tenth 8 % stands earlier word for word. So
    the training text goes without the paragraphs that the validation text has.
    """
    cut = round(len(text) * (1 - share))
    validation = text[cut:]
    held_out = set(validation.split("\n\n"))
    kept = [paragraph for paragraph in text[:cut].split("\n\n") if paragraph not in held_out]
    return "\n\n".join(kept), validation


def encode(text: str, alphabet: str = ALPHABET) -> Tensor:
    """Return the place of each character of `text` in `alphabet`."""
    place = {character: code for code, character in enumerate(alphabet)}
    return torch.tensor([place[character] for character in text])


def unigram_loss(training: Tensor, validation: Tensor) -> float:
    """Return the loss, in nats, of predicting each character by its frequency in training.

    Every character is counted once more than it occurs, so that none is impossible.
    """
    counts = torch.bincount(training, minlength=len(ALPHABET)) + 1
    return -(counts / counts.sum()).log()[validation].mean().item()


class Windows(Dataset[Batch]):
    """Pieces of `context` characters of a text, one every `stride`, each with what follows.

    Window i is a pair (x, y) of codes in which y[t] is the character after x[t].
    """

    def __init__(self, codes: Tensor, context: int, stride: int) -> None:
        self.codes = codes
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.codes) - 1 - self.context) // self.stride + 1

    @override
    def __getitem__(self, i: int) -> Batch:
        piece = self.codes[i * self.stride :][: self.context + 1]
        return piece[:-1], piece[1:]


class TopicsData(L.LightningDataModule):
    """The language reference, in windows of `context` characters.

    Training windows begin anywhere; which of them an epoch shows, and in what order, is drawn
    under the Trainer's seed, and there are as many as fit into the training text side by side.
    Validation windows do lie side by side: all of them, or the first `validation_windows`.
    """

    training: Tensor
    validation: Tensor

    def __init__(
        self, context: int = 128, batch_size: int = 32, validation_windows: int | None = None
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.validation_windows = validation_windows

    @override
    def setup(self, stage: str) -> None:
        training, validation = split(TEXT)
        windows = (len(validation) - 1) // self.context
        if self.validation_windows is not None:
            windows = min(windows, self.validation_windows)
        self.training = encode(training)
        self.validation = encode(validation[: windows * self.context + 1])

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        windows = Windows(self.training, self.context, stride=1)
        sampler = RandomSampler(windows, num_samples=len(windows) // self.context)
        return DataLoader(windows, self.batch_size, sampler=sampler, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Windows(self.validation, self.context, self.context), self.batch_size)


# The model


class Embedding(nn.Module):
    """The first layer: a learned vector for each character, plus one for its position."""

    def __init__(self, characters: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        # From PyTorch's unit variance, which drowns what the first blocks add, training takes
        # twice as many steps to get past guessing from the last two characters.
        for embedding in (self.character, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.size(1), device=x.device)
        return self.dropout(self.character(x) + self.position(positions))


class Attention(nn.Module):
    """Causal self-attention: each character looks at those before it and at itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        # (batch, time, 3 * width) -> three times (batch, heads, time, width / heads)
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A middle layer: attention and a feed-forward net, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.feed_forward_norm(x)))))


class Head(nn.Module):
    """The last layer: a score for every character to come next."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, characters)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.norm(x))


def learning_rate_factor(step: int, steps: int, warm_up: int) -> float:
    """Return the share of the highest learning rate at `step`: a ramp, then half a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


class CharLM(L.LightningModule):
    """A decoder-only transformer over the characters of `alphabet`.

    Args:
        alphabet: All characters it knows. It is saved in the checkpoint with the other arguments,
            so that a loaded model can read and write text.
        context: The most characters it looks back on, itself included.
        blocks, width, heads: Its size.
        dropout: The share of activations that training drops.
        learning_rate: The highest, after warm-up.
    """

    def __init__(
        self,
        alphabet: str = ALPHABET,
        context: int = 128,
        blocks: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 6e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.alphabet = alphabet
        self.context = context
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            Embedding(len(alphabet), context, width, dropout),
            *(Block(width, heads, dropout) for _ in range(blocks)),
            Head(len(alphabet), width),
        )
        self.perplexity = Perplexity()

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the scores (batch, time, characters) of what follows each character of `x`."""
        return self.layers(x)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        scores = self(x).float()  # the metric computes in the precision that it is given
        self.perplexity(scores, y)
        self.log("val_loss", F.cross_entropy(scores.flatten(0, 1), y.flatten()), prog_bar=True)
        self.log("val_perplexity", self.perplexity)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        factor = partial(learning_rate_factor, steps=steps, warm_up=math.ceil(0.05 * steps))
        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @torch.inference_mode()
    def generate(self, prompt: str, characters: int, temperature: float = 0.7) -> str:
        """Return `prompt` continued by `characters` more, each drawn from the model's scores."""
        codes = encode(prompt, self.alphabet).to(self.device)
        for _ in range(characters):
            scores = self(codes[None, -self.context :])[0, -1]
            drawn = torch.multinomial(torch.softmax(scores / temperature, dim=-1), 1)
            codes = torch.cat([codes, drawn])
        return "".join(self.alphabet[code] for code in codes.tolist())


# The run


@dataclass(frozen=True)
class Size:
    """A model, and how much of the text it trains on by default."""

    blocks: int
    width: int
    heads: int
    context: int
    batch_size: int
    learning_rate: float
    steps: int
    validation_windows: int | None
    sample: int  # characters to generate at the end


SIZES = {
    "tiny": Size(2, 32, 2, 32, 16, 1e-2, 20, 64, 60),
    "demo": Size(4, 128, 4, 128, 32, 6e-3, 600, None, 400),
    "gpt2-small": Size(12, 768, 12, 256, 8, 6e-4, 100, 8, 40),
}

# How far the loss of the same weights may move, relatively, when sums are taken in another order.
ROUNDING = {"32-true": 1e-5, "bf16-mixed": 1e-3, "16-mixed": 1e-3}


class Measurements(Callback):
    """Takes down what the last steps cost: tokens per second and, in a pipeline, its timeline.

    The timelines are only kept, and read after the training: on a GPU, reading one waits for it.
    """

    def __init__(self, steps: int = 100) -> None:
        self.speeds = deque[float](maxlen=steps)
        self.timelines = deque[Timeline](maxlen=steps)
        self.stages: Table | None = None
        self._begun = 0.0

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begun = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        ended = time.perf_counter()
        self.speeds.append(batch[0].numel() / (ended - self._begun))
        self._begun = ended
        pipeline = pipeline_of(trainer)
        if pipeline is not None and pipeline.timeline is not None:
            self.timelines.append(pipeline.timeline)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pipeline = pipeline_of(trainer)
        if pipeline is not None:
            self.stages = pipeline.listing()


def pipeline_of(trainer: L.Trainer) -> GPipe | None:
    """Return the pipeline that `trainer` runs, or None in a plain run."""
    return trainer.strategy.pipeline if isinstance(trainer.strategy, GPipeStrategy) else None


def train(
    options: argparse.Namespace, model: CharLM, data: TopicsData
) -> tuple[float, str, Measurements]:
    """Fit `model`, in a pipeline unless `options.plain`.

    Returns:
        The lowest validation loss, the path of the checkpoint saved then, and what the steps cost.
    """
    strategy: Strategy | str = "auto"
    if not options.plain:
        strategy = GPipeStrategy(
            options.balance,
            options.chunks,
            activation_checkpointing=options.activation_checkpointing,
        )
    options.output.mkdir(parents=True, exist_ok=True)
    csv = CSVLogger(options.output, name="")
    checkpoint = ModelCheckpoint(filename="best", monitor="val_loss")
    measurements = Measurements()
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=1 if options.plain else options.devices,
        strategy=strategy,
        precision=options.precision,
        max_steps=options.steps,
        # Every 100 steps, or somewhat more often so that the last validation is near the end.
        val_check_interval=options.steps // math.ceil(options.steps / 100),
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=[csv, TensorBoardLogger(options.output, name="", version=csv.version)],
        log_every_n_steps=10,
        callbacks=[checkpoint, measurements, TQDMProgressBar(refresh_rate=10)],
        enable_model_summary=False,  # the report lists the stages
    )
    trainer.fit(model, data)
    assert checkpoint.best_model_score is not None, "val_check_interval <= max_steps"
    return checkpoint.best_model_score.item(), checkpoint.best_model_path, measurements


def validate_plainly(
    options: argparse.Namespace, model: CharLM, data: TopicsData
) -> tuple[float, float]:
    """Return the validation loss and perplexity of `model` in a Trainer that has no strategy."""
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    [metrics] = trainer.validate(model, data, verbose=False)
    return metrics["val_loss"], metrics["val_perplexity"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, those that depend on the size filled in."""
    parser = argparse.ArgumentParser(
        description="Train a character language model on the Python language reference.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="demo", help="the model")
    add("--devices", type=int, default=2, help="how many, each with one stage or several")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu", help="the kind of the devices")
    add("--balance", type=balance, default="parameters", help='"parameters", or layers per stage')
    add("--chunks", type=int, default=8, help="micro-batches per batch")
    add(
        "--activation-checkpointing",
        choices=["always", "except_last", "never"],
        default="never",
        help="which micro-batches save memory by running forward twice",
    )
    add("--plain", action="store_true", help="one device, without a pipeline")
    add("--steps", type=positive, help="batches to train on; by default, what suits the size")
    add("--batch-size", type=positive, help="windows per batch; by default, what suits the size")
    add("--dropout", type=float, default=0.0, help="the share of activations to drop")
    add("--precision", choices=ROUNDING, default="32-true", help="as the Trainer calls it")
    add("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    add("--output", type=Path, default=Path("runs/char_lm"), help="for logs and the checkpoint")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    options.steps = options.steps or size.steps
    options.batch_size = options.batch_size or size.batch_size
    return options


def balance(argument: str) -> str | list[int]:
    """Return "3,3" as the list [3, 3], and a word as it is."""
    if argument.isalpha():
        return argument
    return [int(layers) for layers in argument.split(",")]


def positive(argument: str) -> int:
    """Return a whole number from 1 on."""
    number = int(argument)
    if number < 1:
        raise ValueError
    return number


def quieten() -> None:
    """Leave out messages that are no news here; all others are shown."""
    # The text is in memory: a worker process would only be one more that wants a core.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    # Lightning 2.6, utilities/_pytree.py, calls this under torch >= 2.9; it is not ours to mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    # Lightning recommends other products.
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "Tip:" not in record.getMessage())


def tabulate(*sections: dict[str, str]) -> Table:
    """Return a table of names and values."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for section in sections:
        for name, value in section.items():
            table.add_row(name, value)
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, load the checkpoint without a pipeline, and report.

    Raises:
        SystemExit: If the checkpoint's validation loss is not the one it was saved with.
    """
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    size = SIZES[options.size]
    data = TopicsData(size.context, options.batch_size, size.validation_windows)
    model = CharLM(
        context=size.context,
        blocks=size.blocks,
        width=size.width,
        heads=size.heads,
        dropout=options.dropout,
        learning_rate=size.learning_rate,
    )
    loss, checkpoint, measurements = train(options, model, data)
    reloaded = CharLM.load_from_checkpoint(checkpoint)
    plain_loss, perplexity = validate_plainly(options, reloaded, data)

    console = Console()
    learning = {
        "validation loss, nats per character": f"{loss:.4f}",
        "validation loss of a unigram model": f"{unigram_loss(data.training, data.validation):.4f}",
        "validation perplexity": f"{perplexity:.3f}",
    }
    cost = {"tokens (characters) per second": f"{median(measurements.speeds):,.0f}"}
    if measurements.stages is not None:
        console.print(measurements.stages)
        timelines = measurements.timelines
        cost["bubble, measured"] = f"{median(timeline.bubble for timeline in timelines):.1%}"
        cost["bubble, by the schedule"] = f"{timelines[-1].schedule.bubble:.1%}"
    agreement = {
        "checkpoint's validation loss, when saved": f"{loss:.7f}",
        "the same, loaded into a plain Trainer": f"{plain_loss:.7f}",
        "difference": f"{plain_loss - loss:+.1e}",
    }
    console.print(tabulate(learning, cost, agreement))
    console.print(Panel(Text(reloaded.generate("The ", size.sample)), title="Sample"))
    console.print(f"Logs and checkpoint: {Path(checkpoint).parents[1]}", soft_wrap=True)

    if not math.isclose(loss, plain_loss, rel_tol=ROUNDING[options.precision]):
        raise SystemExit(
            f"The checkpoint has another validation loss in a plain Trainer: {plain_loss} there, "
            f"{loss} when it was saved. They differ by more than rounding."
        )


if __name__ == "__main__":
    main()
