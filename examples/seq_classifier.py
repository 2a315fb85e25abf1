"""Which package of Python's standard library does a docstring come from?

Most docstrings are one line and a few are pages, so most of a padded batch is padding. One argument
of the strategy, `microbatching` in `main`, removes it: `PaddedSequences` sorts the rows of a batch
by length, splits them into micro-batches with about equal numbers of tokens, and trims each to its
longest row. `PackageClassifier` is an ordinary LightningModule, whose layers pass dicts and mask
the padding. The first layer counts the tokens.

The docstrings are those of the Python that runs this, so nothing is downloaded. The final report
compares the accuracy with that of always guessing the largest package. It also shows the speed, the
tokens saved, and the loss of the saved checkpoint in a plain Trainer, without trimming.

    python -m examples.seq_classifier               # 2 stages on 2 CPU cores, about 2 minutes
    python -m examples.seq_classifier --untrimmed   # the same without trimming, to compare
    python -m examples.seq_classifier --accelerator gpu --width 512 --batch-size 256
"""

import ast
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy, PaddedSequences

Value = dict[str, Any]  # a layer's input and output: tensors with a row per docstring, or dicts
Batch = tuple[Value, Tensor]  # and the package of each row

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LONGEST = 256  # words; the rest of the longest docstrings is cut off
CODES = 8192


class Docstring(NamedTuple):
    package: str
    kind: int  # of the documented object: an index into DOCUMENTED
    words: tuple[str, ...]  # and punctuation marks


@cache
def docstrings() -> list[Docstring]:
    """Return the docstrings of the standard library, each once, without those of several packages.

    Otherwise the validation set would contain training examples.
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


class DocstringData(L.LightningDataModule):
    """The docstrings of the largest packages; every fifth is for validation."""

    def __init__(self, packages: int = 16, batch_size: int = 64) -> None:
        super().__init__()
        self.packages = packages
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        sizes = Counter(docstring.package for docstring in docstrings())
        self.names = [name for name, _ in sizes.most_common(self.packages)]  # the largest first
        chosen = [docstring for docstring in docstrings() if docstring.package in self.names]
        self.training: Any = [docstring for k, docstring in enumerate(chosen) if k % 5]
        self.validation: Any = chosen[::5]

    def collate(self, samples: Sequence[Docstring]) -> Batch:
        """Encode words by their checksums, pad to the longest row, and add the lengths."""
        codes = [[crc32(word.encode()) % CODES for word in sample.words] for sample in samples]
        inputs = {
            "tokens": pad_sequence([torch.tensor(code) for code in codes], batch_first=True),
            "lengths": torch.tensor([len(code) for code in codes]),
            "additional_info": {"kind": torch.tensor([sample.kind for sample in samples])},
        }
        return inputs, torch.tensor([self.names.index(sample.package) for sample in samples])

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.training, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate
        )

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, self.batch_size, collate_fn=self.collate)


class Embedding(nn.Module):
    """The first layer: a vector for each word and its position. It records the padded length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(CODES, width)
        self.position = nn.Embedding(LONGEST, width)
        for embedding in (self.word, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, inputs: Value) -> Value:
        tokens, lengths = inputs["tokens"], inputs["lengths"]
        places = torch.arange(tokens.size(1), device=tokens.device)
        return inputs | {
            "x": self.word(tokens) + self.position(places),
            "padding": places >= lengths[:, None],
            "computed": torch.full_like(lengths, len(places)),
        }


class Block(nn.Module):
    """A middle layer: self-attention between words, with the padding masked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, value: Value) -> Value:
        return value | {"x": self.encoder(value["x"], src_key_padding_mask=value["padding"])}


class Head(nn.Module):
    """The last layer: a score for each package, from the mean of the words and from the kind."""

    def __init__(self, packages: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.kind = nn.Embedding(len(DOCUMENTED), width)
        self.score = nn.Linear(width, packages)

    def forward(self, value: Value) -> Value:
        words = self.norm(value["x"]).masked_fill(value["padding"][:, :, None], 0.0)
        mean = words.sum(dim=1) / value["lengths"][:, None]
        scores = self.score(mean + self.kind(value["additional_info"]["kind"]))
        return {"scores": scores, "computed": value["computed"]}


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

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, packages = batch
        output = self.layers(inputs)
        padded, computed = float(inputs["tokens"].numel()), output["computed"].sum().float()
        tokens = {"tokens_padded": padded, "tokens_computed": computed}
        self.log_dict(tokens, on_step=False, on_epoch=True, reduce_fx="sum")
        loss = F.cross_entropy(output["scores"], packages)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, packages = batch
        scores = self.layers(inputs)["scores"]
        self.accuracy(scores, packages)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(scores, packages))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, and report."""
    parser = options_parser(__doc__, output="runs/seq_classifier", balance=[3, 3], batch_size=64)
    parser.add_argument("--untrimmed", action="store_true", help="cut batches as they are padded")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 16")
    options = start(parser, arguments)

    data = DocstringData(batch_size=options.batch_size)
    model = PackageClassifier(width=options.width)

    # The pipeline. With the Trainer's default, strategy="auto", the same training is a plain one.
    trimmed = PaddedSequences("lengths", trim=["tokens"], pad_outputs=False)
    strategy = GPipeStrategy(
        options.balance,
        options.chunks,
        activation_checkpointing="never",
        microbatching=None if options.untrimmed else trimmed,
    )

    best = ModelCheckpoint(filename="best", monitor="val_accuracy", mode="max")
    measurements = Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1 if options.steps else 5,
        limit_train_batches=options.steps,
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    metrics = trainer.callback_metrics
    saved = 1 - metrics["tokens_computed"] / metrics["tokens_padded"]
    cost = {"tokens saved in the last epoch": f"{saved:.1%}"}
    cost |= measurements.cost("docstrings", options.batch_size)
    largest = [docstring.package == data.names[0] for docstring in data.validation]
    guess = {"val_accuracy": sum(largest) / len(largest)}
    report(trainer, model, data, best, guess, cost)


if __name__ == "__main__":
    main()
