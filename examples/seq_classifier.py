"""Which package of Python's standard library does a docstring come from?

Most docstrings are one line and a few are pages. A padded batch of them is mostly padding, and a
model that looks at all of it is mostly busy with nothing. Here a pipeline puts the rows of a batch
in order of their lengths, cuts them into micro-batches of about as many tokens, and trims each to
its own longest. One argument does it:

    GPipeStrategy(microbatching=PaddedSequences("lengths", trim=["tokens"], pad_outputs=False))

`PackageClassifier`, a small transformer that reads in both directions, is an ordinary
LightningModule whose layers pass dicts on and mask what lies beyond `lengths`. They also find out
how much they compute: the first one notes for each row how wide it was there, which travels with
the row through all stages and comes out beside its scores.

The docstrings are those of the Python that runs this, so there is nothing to download. The report
shows what was learnt, beside always guessing the largest package; how far the pipeline's scores are
from those of a plain Trainer, which trims nothing; and what three ways to make micro-batches cost.

    python examples/seq_classifier.py                     # 2 stages on 2 CPU cores, about 2 minutes
    python examples/seq_classifier.py --accelerator gpu --devices 2 --width 512 --batch-size 256
"""

import argparse
import ast
import logging
import re
import sysconfig
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import islice
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from zlib import crc32

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_gpipe import GPipe, GPipeStrategy, PaddedSequences, Rows

Value = dict[str, Any]  # what layers take and return: tensors with a row per docstring, or dicts
Batch = tuple[Value, Tensor]


# The docstrings

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LONGEST = 256  # words; the rest of the longest docstrings is cut off
CODES = 8192


class Docstring(NamedTuple):
    package: str
    kind: int  # of what it documents: its place in DOCUMENTED
    words: tuple[str, ...]  # and punctuation marks


@cache
def docstrings() -> list[Docstring]:
    """Return all docstrings of the standard library, each text once.

    Otherwise validation would ask for what training has shown. A text that several packages have is
    left out.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = defaultdict[tuple[str, ...], dict[str, Docstring]](dict)
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if NOT_THE_LIBRARY.intersection(parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                words = tuple(re.findall(r"\w+|[^\w\s]", text))[:LONGEST]
                found[words][parts[0]] = Docstring(parts[0], DOCUMENTED.index(type(node)), words)
    return [each for homes in found.values() if len(homes) == 1 for each in homes.values()]


def encode(words: Iterable[str]) -> Tensor:
    """Return a code for each word: the remainder of its checksum, so there is no vocabulary."""
    return torch.tensor([crc32(word.encode()) % CODES for word in words])


class DocstringData(L.LightningDataModule):
    """The docstrings of the packages that have the most; every fifth is for validation."""

    names: list[str]  # of the packages, the largest first
    training: list[Docstring]
    validation: list[Docstring]

    def __init__(self, packages: int = 16, batch_size: int = 64) -> None:
        super().__init__()
        self.packages = packages
        self.batch_size = batch_size

    @override
    def setup(self, stage: str) -> None:
        sizes = Counter(docstring.package for docstring in docstrings())
        self.names = [name for name, _ in sizes.most_common(self.packages)]
        chosen = [docstring for docstring in docstrings() if docstring.package in self.names]
        self.training = [docstring for k, docstring in enumerate(chosen) if k % 5]
        self.validation = chosen[::5]

    def collate(self, samples: Sequence[Docstring]) -> Batch:
        """Pad to the longest, and say how long each is."""
        codes = [encode(sample.words) for sample in samples]
        inputs = {
            "tokens": pad_sequence(codes, batch_first=True),
            "lengths": torch.tensor([len(code) for code in codes]),
            "additional_info": {"kind": torch.tensor([sample.kind for sample in samples])},
        }
        return inputs, torch.tensor([self.names.index(sample.package) for sample in samples])

    def _loader(self, samples: Any, *, training: bool) -> DataLoader[Docstring]:
        return DataLoader(
            samples, self.batch_size, training, collate_fn=self.collate, drop_last=training
        )

    @override
    def train_dataloader(self) -> DataLoader[Docstring]:
        return self._loader(self.training, training=True)

    @override
    def val_dataloader(self) -> DataLoader[Docstring]:
        return self._loader(self.validation, training=False)


# The model


class Embedding(nn.Module):
    """The first layer: a vector for each word and its position. It notes how wide a row was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(CODES, width)
        self.position = nn.Embedding(LONGEST, width)
        for embedding in (self.word, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    @override
    def forward(self, inputs: Value) -> Value:
        tokens, lengths = inputs["tokens"], inputs["lengths"]
        longest = tokens.size(1)
        computed = torch.full_like(lengths, longest)
        return {
            "x": self.word(tokens) + self.position.weight[:longest],
            "lengths": lengths,
            "additional_info": inputs["additional_info"] | {"computed": computed},
        }


def padding(x: Tensor, lengths: Tensor) -> Tensor:
    """Return which places of `x` are beyond their row's length, as bool (rows, longest)."""
    return torch.arange(x.size(1), device=x.device) >= lengths[:, None]


class Block(nn.Module):
    """A middle layer: words look at one another, and none looks at padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    @override
    def forward(self, value: Value) -> Value:
        x = value["x"]
        return value | {"x": self.encoder(x, src_key_padding_mask=padding(x, value["lengths"]))}


class Head(nn.Module):
    """The last layer: a score for each package, from the mean of the words and from the kind."""

    def __init__(self, packages: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.kind = nn.Embedding(len(DOCUMENTED), width)
        self.score = nn.Linear(width, packages)

    @override
    def forward(self, value: Value) -> Value:
        x, lengths, info = value["x"], value["lengths"], value["additional_info"]
        words = self.norm(x).masked_fill(padding(x, lengths)[:, :, None], 0.0)
        mean = words.sum(dim=1) / lengths[:, None]
        return {"scores": self.score(mean + self.kind(info["kind"])), "computed": info["computed"]}


class PackageClassifier(L.LightningModule):
    """A transformer encoder that guesses the package of a docstring."""

    def __init__(
        self, packages: int = 16, blocks: int = 4, width: int = 64, learning_rate: float = 2e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        middle = (Block(width) for _ in range(blocks))
        self.layers = nn.Sequential(Embedding(width), *middle, Head(packages, width))
        self.accuracy = MulticlassAccuracy(packages, average="micro")

    @override
    def forward(self, inputs: Value) -> Value:
        """Return `scores` (rows, packages), and how many tokens of each row were `computed`."""
        return self.layers(inputs)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, packages = batch
        output = self(inputs)
        tokens = {
            "tokens_padded": float(inputs["tokens"].numel()),
            "tokens_computed": output["computed"].sum().float(),
        }
        self.log_dict(tokens, on_step=False, on_epoch=True, reduce_fx="sum")
        loss = F.cross_entropy(output["scores"], packages)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, packages = batch
        self.accuracy(self(inputs)["scores"], packages)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, _ = batch
        return self(inputs)["scores"]

    @override
    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=self.learning_rate)


# The run


def train(options: argparse.Namespace, data: DocstringData) -> tuple[L.Trainer, str]:
    """Fit a model in a pipeline; return the Trainer and the path of the best checkpoint."""
    model = PackageClassifier(width=options.width)
    checkpoint = ModelCheckpoint(filename="best", monitor="val_accuracy", mode="max")
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=GPipeStrategy(
            even_balance(model, options.devices),
            options.chunks,
            activation_checkpointing="never",
            microbatching=PaddedSequences("lengths", trim=["tokens"], pad_outputs=False),
        ),
        max_epochs=options.epochs,
        limit_train_batches=options.steps,
        logger=CSVLogger(options.output, name=""),
        callbacks=[checkpoint, TQDMProgressBar(refresh_rate=10)],
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    return trainer, checkpoint.best_model_path


def even_balance(model: PackageClassifier, devices: int) -> list[int]:
    """Return equal numbers of layers: the embedding has most of the parameters, but no work."""
    return [len(part) for part in torch.arange(len(model.layers)).tensor_split(devices)]


def predict(trainer: L.Trainer, checkpoint: str, data: DocstringData) -> Tensor:
    """Return the scores that a checkpoint gives for the validation docstrings."""
    model = PackageClassifier.load_from_checkpoint(checkpoint)
    scores: Any = trainer.predict(model, data.val_dataloader())
    return torch.cat(scores).cpu()


def compare(options: argparse.Namespace, model: PackageClassifier, batches: list[Batch]) -> Table:
    """Return what three ways to make micro-batches of `batches` cost, in tokens and in time.

    They take turns at the forward and backward of each batch, so that whatever else slows down the
    machine slows down all of them.
    """
    trimming = partial(PaddedSequences, "lengths", trim=["tokens"], pad_outputs=False)
    ways = {
        "Rows": Rows(),
        "PaddedSequences, unsorted": trimming(sort=False),
        "PaddedSequences": trimming(),
    }
    gpu = options.accelerator == "gpu"
    pipeline = GPipe(
        model.layers,
        even_balance(model, options.devices),
        devices=[f"cuda:{k}" if gpu else "cpu" for k in range(options.devices)],
        chunks=options.chunks,
        activation_checkpointing="never",
    )
    computed = dict.fromkeys(ways, 0)
    seconds = {name: list[float]() for name in ways}
    for inputs, packages in batches:
        for name, way in ways.items():
            pipeline.microbatching = way
            begun = time.perf_counter()
            output = pipeline(inputs)
            F.cross_entropy(output["scores"], packages.to(pipeline.devices[-1])).backward()
            if gpu:
                torch.cuda.synchronize(pipeline.devices[0])  # where backward ends
            seconds[name].append(time.perf_counter() - begun)
            computed[name] += int(output["computed"].sum())
    pipeline.close()

    padded = sum(inputs["tokens"].numel() for inputs, _ in batches)
    words = sum(int(inputs["lengths"].sum()) for inputs, _ in batches)
    table = Table("micro-batches", "tokens computed", "saved", "s / step", "speed-up")
    for name in ways:
        gains = map(truediv, seconds["Rows"], seconds[name])
        cost = f"{median(seconds[name]):.3f}", f"{median(gains):.2f}"
        table.add_row(name, f"{computed[name]:,}", f"{1 - computed[name] / padded:.1%}", *cost)
    table.add_row("the words alone", f"{words:,}", f"{1 - words / padded:.1%}")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Guess the package of a docstring, in a pipeline that trims padding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=int, default=2, help="how many, each with one stage")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu", help="the kind of the devices")
    add("--chunks", type=int, default=8, help="micro-batches per batch")
    add("--width", type=int, default=64, help="of the model, a multiple of 16")
    add("--batch-size", type=int, default=64, help="docstrings per batch")
    add("--epochs", type=int, default=5, help="how often to show all docstrings")
    add("--steps", type=int, help="batches per epoch; by default, all")
    add("--repeats", type=int, default=7, help="batches to compare the ways with")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--output", type=Path, default=Path("runs/seq_classifier"), help="for log and checkpoint")
    return parser.parse_args(arguments)


def quieten() -> None:
    """Leave out messages that are no news here; all others are shown."""
    # The text is in memory: a worker process would only be one more that wants a core.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    # Lightning 2.6, utilities/_pytree.py, calls this under torch >= 2.9; it is not ours to mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    # Lightning recommends other products.
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "Tip:" not in record.getMessage())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, load the checkpoint without a pipeline, compare, and report.

    Raises:
        SystemExit: If the checkpoint has other scores without a pipeline.
    """
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    data = DocstringData(batch_size=options.batch_size)
    trainer, checkpoint = train(options, data)
    metrics = dict(trainer.callback_metrics)
    piped = predict(trainer, checkpoint, data)
    alone = L.Trainer(
        accelerator=options.accelerator, devices=1, logger=False, enable_progress_bar=False
    )
    plain = predict(alone, checkpoint, data)
    difference = (piped - plain).abs().max().item()

    _, packages = data.collate(data.validation)
    padded, computed = metrics["tokens_padded"], metrics["tokens_computed"]
    table = Table(show_header=False)
    for name, value in {
        "validation accuracy": f"{(piped.argmax(dim=1) == packages).float().mean():.1%}",
        f"the same, always guessing {data.names[0]}": f"{(packages == 0).float().mean():.1%}",
        "largest difference to the scores of a plain Trainer": f"{difference:.1e}",
        "tokens of the last epoch, padded": f"{padded:,.0f}",
        "tokens of the last epoch, computed": f"{computed:,.0f}",
        "saved": f"{1 - computed / padded:.1%}",
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    batches = islice(data.train_dataloader(), options.repeats)
    model = PackageClassifier.load_from_checkpoint(checkpoint).train()
    console.print(compare(options, model, list(batches)))
    console.print(f"Log and checkpoint: {Path(checkpoint).parents[1]}", soft_wrap=True)
    if difference > 1e-3:
        raise SystemExit(f"scores without a pipeline must be the same: they differ by {difference}")


if __name__ == "__main__":
    main()
