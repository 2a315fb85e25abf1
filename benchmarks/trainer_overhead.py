"""Claim: with one stage and one chunk a step of the Trainer takes 1.03 times plain Lightning's.

With one stage on one device a pipeline gains nothing, so its cost can be measured. The same
LightningModule, a language model of the size of ``make demo``, is fitted by a Trainer without a
strategy and by one with ``GPipeStrategy([k], chunks=1)``. The fits do one batch each, in turns, and
all of it is timed: from the end of one batch to the end of the next, with data, hooks and
optimizer. Each runs on a thread of its own; the time to wake it does not count.

For information, the same with recomputation, against ``torch.utils.checkpoint`` around all layers;
the same model on a batch of an eighth of the characters; and a nearly empty model, to show the cost
alone.

    python -m benchmarks.trainer_overhead
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from benchmarks.harness import Contestant, Report, Times, agree, contest, options, ratio
from benchmarks.models.transformer import transformer
from lightning_gpipe import GPipeStrategy

CHARACTERS = 100
AT_MOST = 1.03
AGREEING = 3  # batches before any is timed; weights that differ would show in the later gradients

Batch = tuple[Tensor, Tensor]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "trainer_overhead",
        __doc__,
        rounds=40,
        argv=argv,
        blocks=4,
        width=128,
        time=128,
        batch_size=32,
        threads=1,
    )
    torch.manual_seed(0)
    model, tiny = language_model(given.blocks, given.width), language_model(0, 8)
    batch, part = characters(given.batch_size, given.time), characters(4, given.time)
    report = Report(given, f"One batch of the Trainer, {given.threads} intra-op threads")
    for name, layers, data, rounds in (
        ("demo", model, batch, given.rounds),
        ("an eighth", model, part, given.rounds),
        ("tiny", tiny, part, 3 * given.rounds),
    ):
        with quiet():
            times = timed(name, layers, data, rounds, given.threads)
        report.times(times)
        ours, plain = f"{name}, ours", f"{name}, plain Lightning"
        at_most = AT_MOST if name == "demo" else None
        report.target(f"{ours} / plain Lightning", ratio(times, ours, plain), at_most=at_most)
        found = ratio(times, f"{ours}, always", f"{name}, torch.utils.checkpoint")
        report.target(f"{ours}, always / torch.utils.checkpoint", found)
        more = times[ours].median - times[plain].median
        report.notes.append(f"{name}: a step takes {1e3 * more:.2f} ms more than plain.")
    report.publish()


def characters(rows: int, time: int) -> Batch:
    """Texts of so many random characters, and the same one character further."""
    codes = torch.randint(CHARACTERS, (rows, time + 1))
    return codes[:, :-1], codes[:, 1:]


def language_model(blocks: int, width: int) -> nn.Sequential:
    """Layers from codes of characters (batch, time) to scores (batch, time, CHARACTERS)."""
    return nn.Sequential(
        nn.Embedding(CHARACTERS, width),
        *transformer(blocks, width),
        nn.LayerNorm(width),
        nn.Linear(width, CHARACTERS),
    )


def timed(
    name: str, layers: nn.Sequential, batch: Batch, rounds: int, threads: int
) -> dict[str, Times]:
    """Time the four ways to fit the layers."""

    def ours(**more: Any) -> GPipeStrategy:
        return GPipeStrategy([len(layers)], chunks=1, module="layers", **more)

    ways: dict[str, tuple[Strategy | str, bool]] = {
        "plain Lightning": ("auto", False),
        "ours": (ours(), False),
        "torch.utils.checkpoint": ("auto", True),
        "ours, always": (ours(activation_checkpointing="always"), False),
    }
    with ExitStack() as stack:
        contestants = []
        for way, (strategy, recomputed) in ways.items():
            model = LanguageModel(copy.deepcopy(layers), batch, recomputed=recomputed)
            fit = stack.enter_context(fitting(model, strategy, threads))
            contestants.append(fit.contestant(f"{name}, {way}"))
        for _ in range(AGREEING):
            agree(contestants)
        return contest(contestants, rounds=rounds, warm_up=5)


class LanguageModel(L.LightningModule):
    """Learns one and the same batch over and over."""

    def __init__(self, layers: nn.Sequential, batch: Batch, *, recomputed: bool) -> None:
        super().__init__()
        self.layers = layers
        self.batch = batch
        self.recomputed = recomputed

    @override
    def training_step(self, batch: Batch) -> Tensor:
        x, y = batch
        if self.recomputed:
            scores = checkpoint(self.layers, x, use_reentrant=False)
        else:
            scores = self.layers(x)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Repeated(self.batch), batch_size=None)


class Repeated(IterableDataset[Batch]):
    """One batch, for ever."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.batch


class Fit(Callback):
    """A fit on a thread of its own, which stops after every batch until it is resumed."""

    def __init__(self, model: L.LightningModule, strategy: Strategy | str, threads: int) -> None:
        self._model, self._threads = model, threads
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._begun = self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(strategy,), daemon=True)
        self._trainer: L.Trainer | None = None

    def begin(self) -> None:
        """Fit up to the first batch."""
        self._thread.start()
        self._wait()

    def step(self) -> float:
        """Fit one batch, and tell how many seconds it took."""
        self._go.release()
        self._wait()
        return self._seconds

    def end(self) -> None:
        """Leave it after the batch that was the last."""
        if self._trainer is not None:
            self._trainer.should_stop = True
        self._go.release()
        self._thread.join()

    def contestant(self, name: str) -> Contestant:
        """Who does one batch in each step."""

        def gradients() -> list[Tensor]:
            self.step()
            return [each.grad for each in self._model.parameters() if each.grad is not None]

        return Contestant(name, self.step, gradients)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._seconds = time.perf_counter() - self._begun
        self._pause()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()
        self._begun = time.perf_counter()

    def _run(self, strategy: Strategy | str) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._trainer = L.Trainer(
                accelerator="cpu",
                devices=1,
                strategy=strategy,
                max_epochs=-1,
                callbacks=[self],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            self._trainer.fit(self._model)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


@contextmanager
def fitting(model: L.LightningModule, strategy: Strategy | str, threads: int) -> Iterator[Fit]:
    """A fit for the duration of a ``with`` block."""
    fit = Fit(model, strategy, threads)
    fit.begin()
    try:
        yield fit
    finally:
        fit.end()


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning says of every Trainer."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers")
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            yield
    finally:
        log.setLevel(before)


if __name__ == "__main__":
    main()
