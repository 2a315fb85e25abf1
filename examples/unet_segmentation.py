"""Which digit does each pixel belong to? A U-Net, trained as a pipeline with skip connections.

A U-Net halves the resolution again and again to see what is there, and doubles it again to say
where. What it needs for the second it kept from the first: at each resolution the *detail*, a
tensor that a late layer wants from an early one. In a pipeline those two layers are usually on
different devices. So the early one stashes it, the late one pops it, and it goes from the one stage
straight to the other: the stages between never see it.

`Shrink` and `Enlarge` below are all there is to that. The layers are the children of one flat
`nn.Sequential`, which runs on one device as it is, and the LightningModule is an ordinary one. Its
batch norms are ordinary as well; in a pipeline their running statistics are those of the batch.

The digits are real: 1,797 scans of 8 x 8 pixels that come with scikit-learn, so there is nothing to
download. They are scattered over larger, noisy canvases, in several sizes, and no scan is in both
training and validation canvases.

    python examples/unet_segmentation.py              # 2 stages on 2 CPU cores, about 3 minutes
    python examples/unet_segmentation.py --plain      # the same model on one device, no pipeline
    python examples/unet_segmentation.py --accelerator gpu --devices 4 --width 64 --canvas 96
"""

import argparse
import logging
import time
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no stubs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchmetrics.segmentation import DiceScore
from typing_extensions import override

from lightning_gpipe import GPipe, GPipeStrategy
from lightning_gpipe.core.run.timeline import Timeline
from lightning_gpipe.skip import Namespace, with_skips

Batch = tuple[Tensor, Tensor]  # images (rows, 1, height, width) and classes (rows, height, width)

BACKGROUND = 10  # the class of a pixel that belongs to no digit; classes 0 to 9 are the digits
CLASSES = 11
INK = 0.4  # a pixel with more than that belongs to the digit
PALETTE = torch.cat([torch.tensor(colormaps["tab10"](range(10)))[:, :3], torch.zeros(1, 3)])


# The canvases


class Canvases(Dataset[tuple[Tensor, Tensor]]):
    """Canvases with some of the `scans` on them, `size` pixels high and wide.

    Each has one of the `numbers`, and the same number always gives the same canvas.
    """

    def __init__(
        self, scans: Tensor, digits: Tensor, numbers: range, size: int = 48, noise: float = 0.2
    ) -> None:
        self.scans = scans
        self.digits = digits
        self.numbers = numbers
        self.size = size
        self.noise = noise

    def __len__(self) -> int:
        return len(self.numbers)

    @override
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.numbers[i])
        draw = partial(torch.randint, generator=generator)
        image = torch.zeros(self.size, self.size)
        classes = torch.full((self.size, self.size), BACKGROUND)
        for _ in range(self.size // 4):  # attempts to find a free place; of 12, some 4 succeed
            scan = int(draw(len(self.scans), ()))
            side = int(draw(12, 21, ()))
            top, left = draw(self.size - side + 1, (2,)).tolist()
            place = (slice(top, top + side), slice(left, left + side))
            if (classes[place] != BACKGROUND).any():
                continue
            ink = F.interpolate(self.scans[scan][None, None], (side, side), mode="bilinear")[0, 0]
            image[place] = torch.maximum(image[place], ink)
            classes[place] = torch.where(ink > INK, self.digits[scan], BACKGROUND)
        noise = torch.randn(self.size, self.size, generator=generator)
        return (image + self.noise * noise)[None], classes


def scans() -> tuple[Tensor, Tensor]:
    """Return the scans (1797, 8, 8), with ink from 0 to 1, and which digit each is."""
    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)


class DigitsData(L.LightningDataModule):
    """Canvases of the first four fifths of the scans for training, of the others for validation.

    By default no training canvas is shown twice: one epoch is all the training there is.
    """

    training: Canvases
    validation: Canvases

    def __init__(
        self,
        canvases: int = 16_000,
        validation_canvases: int = 256,
        batch_size: int = 32,
        size: int = 48,
    ) -> None:
        super().__init__()
        self.canvases = canvases
        self.validation_canvases = validation_canvases
        self.batch_size = batch_size
        self.size = size

    @override
    def setup(self, stage: str) -> None:
        images, digits = scans()
        cut = len(images) * 4 // 5
        numbers = range(self.canvases)
        self.training = Canvases(images[:cut], digits[:cut], numbers, self.size)
        numbers = range(10**6, 10**6 + self.validation_canvases)  # others: digits in other places
        self.validation = Canvases(images[cut:], digits[cut:], numbers, self.size)

    @override
    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.training, self.batch_size, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.validation, self.batch_size)


# The model


class Convolution(nn.Module):
    """Looks at the 3 x 3 pixels around each pixel."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolve(x)))


@with_skips(stash=["detail"])
class Shrink(nn.Module):
    """Halves the resolution, and stashes what is lost by it."""

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.max_pool2d(x, 2), {"detail": x}


@with_skips(pop=["detail"])
class Enlarge(nn.Module):
    """Doubles the resolution, and puts the detail of that resolution beside the result."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)

    @override
    def forward(self, x: Tensor, detail: Tensor) -> Tensor:
        return torch.cat([detail, self.enlarge(x)], dim=1)


def u_net(width: int, levels: int) -> nn.Sequential:
    """Return the layers of a U-Net that halves the resolution `levels` times.

    Each level has its own namespace, so that every `Enlarge` pops the detail of its own level::

        Convolution x2, Shrink ───────── detail ────────── Enlarge, Convolution x2, Conv2d
            Convolution x2, Shrink ───── detail ────── Enlarge, Convolution x2
                Convolution x2, Shrink ─ detail ── Enlarge, Convolution x2
                                  Convolution x2
    """
    down: list[nn.Module] = []
    up: list[nn.Module] = [nn.Conv2d(width, CLASSES, 1)]
    before = 1
    for level in range(levels):
        here = width << level
        namespace = Namespace()
        shrink = Shrink().isolate(namespace)  # type: ignore[operator]  # the decorator adds it
        enlarge = Enlarge(2 * here, here).isolate(namespace)  # type: ignore[operator]
        down += [Convolution(before, here), Convolution(here, here), shrink]
        up = [enlarge, Convolution(2 * here, here), Convolution(here, here), *up]
        before = here
    middle = [Convolution(before, 2 * before), Convolution(2 * before, 2 * before)]
    return nn.Sequential(*down, *middle, *up)


class UNet(L.LightningModule):
    """A U-Net that gives each pixel of a canvas a score for every class.

    Args:
        width: The channels at full resolution; each halving of the resolution doubles them.
        levels: How often the resolution is halved.
        learning_rate: The highest, after warm-up.
    """

    def __init__(self, width: int = 12, levels: int = 3, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.layers = u_net(width, levels)
        self.mean_iou = MulticlassJaccardIndex(CLASSES)
        self.dice = DiceScore(CLASSES, aggregation_level="global", input_format="index")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the scores (rows, classes, height, width) of `images` (rows, 1, height, width)."""
        return self.layers(images)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, classes = batch
        found = self(images).argmax(dim=1)
        self.mean_iou(found, classes)
        self.dice(found, classes)
        self.log("val_mean_iou", self.mean_iou, prog_bar=True)
        self.log("val_dice", self.dice)
        if batch_idx == 0:
            for logger in self.loggers:
                if isinstance(logger, TensorBoardLogger):
                    pictures = side_by_side(images[:8], classes[:8], found[:8])
                    logger.experiment.add_images("canvas, truth, found", pictures, self.global_step)

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, _ = batch
        return self(images)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, self.learning_rate, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def side_by_side(images: Tensor, *maps: Tensor) -> Tensor:
    """Return colour pictures (rows, 3, height, width) of canvases and of maps of classes."""
    canvases = images.float().cpu().clamp(0, 1).expand(-1, 3, -1, -1)
    return torch.cat([canvases, *(PALETTE[each.cpu()].movedim(3, 1) for each in maps)], dim=3)


def contact_sheet(images: Tensor, classes: Tensor, found: Tensor) -> Figure:
    """Return a figure with a row per canvas: the canvas, its true classes, those found."""
    rows = F.pad(side_by_side(images, classes, found), (0, 0, 1, 0), value=1.0)  # a line above
    figure = Figure(figsize=(5, 0.6 + 5 / 3 * len(images)), layout="constrained")
    ax = figure.subplots()
    ax.imshow(torch.cat(list(rows), dim=1).movedim(0, 2).numpy())
    ax.axis("off")
    figure.suptitle("canvas, truth, found")
    patches = [Patch(color=f"C{k}", label=str(k)) for k in range(BACKGROUND)]  # tab10, too
    figure.legend(handles=patches, loc="outside lower center", ncols=5)
    return figure


# The run


class Measurements(Callback):
    """Takes down what the last steps cost: images per second and, in a pipeline, its timeline."""

    def __init__(self, steps: int = 100) -> None:
        self.speeds = deque[float](maxlen=steps)
        self.timelines = deque[Timeline](maxlen=steps)
        self.stages: Table | None = None
        self._begun = 0.0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
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
        self.speeds.append(len(batch[0]) / (time.perf_counter() - self._begun))
        match trainer.strategy:
            case GPipeStrategy(pipeline=GPipe(timeline=Timeline() as timeline) as pipeline):
                self.timelines.append(timeline)
                self.stages = self.stages or pipeline.listing()


def train(options: argparse.Namespace, data: DigitsData) -> tuple[L.Trainer, str, Measurements]:
    """Fit a model, in a pipeline unless `options.plain`.

    Returns:
        The Trainer, the path of the best checkpoint, and what the steps cost.
    """
    model = UNet(options.width)
    strategy: Strategy | str = "auto"
    if not options.plain:
        even = [len(part) for part in torch.arange(len(model.layers)).tensor_split(options.devices)]
        strategy = GPipeStrategy(
            options.balance or even, options.chunks, activation_checkpointing="never"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    csv = CSVLogger(options.output, name="")
    checkpoint = ModelCheckpoint(filename="best", monitor="val_mean_iou", mode="max")
    measurements = Measurements()
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=1 if options.plain else options.devices,
        strategy=strategy,
        max_epochs=1,
        val_check_interval=min(100, options.steps),
        logger=[csv, TensorBoardLogger(options.output, name="", version=csv.version)],
        log_every_n_steps=10,
        callbacks=[checkpoint, measurements, TQDMProgressBar(refresh_rate=10)],
        enable_model_summary=False,  # the report lists the stages
    )
    trainer.fit(model, data)
    return trainer, checkpoint.best_model_path, measurements


def predict(trainer: L.Trainer, checkpoint: str, data: DigitsData) -> Tensor:
    """Return the scores that a checkpoint gives for the validation canvases."""
    model = UNet.load_from_checkpoint(checkpoint)
    scores: Any = trainer.predict(model, data.val_dataloader())
    return torch.cat(scores).cpu()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Segment canvases of handwritten digits with a U-Net, in a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=int, default=2, help="how many, each with one stage or several")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu", help="the kind of the devices")
    add("--balance", type=balance, help='layers per stage, or "parameters"; by default, even')
    add("--chunks", type=int, default=8, help="micro-batches per batch")
    add("--plain", action="store_true", help="one device, without a pipeline")
    add("--width", type=int, default=12, help="channels at full resolution")
    add("--canvas", type=int, default=48, help="height and width in pixels: 24, 32, 40 ...")
    add("--steps", type=int, default=500, help="batches to train on")
    add("--batch-size", type=int, default=32, help="canvases per batch")
    add("--validation", type=int, default=256, help="canvases to validate on")
    add("--seed", type=int, default=0, help="of the weights")
    add("--output", type=Path, default=Path("runs/unet_segmentation"), help="for all that is saved")
    return parser.parse_args(arguments)


def balance(argument: str) -> str | list[int]:
    """Return "11,10" as the list [11, 10], and a word as it is."""
    return argument if argument.isalpha() else [int(layers) for layers in argument.split(",")]


def quieten() -> None:
    """Leave out messages that are no news here; all others are shown."""
    # Drawing a canvas is quick: a worker process would only be one more that wants a core.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    # Lightning 2.6, utilities/_pytree.py, calls this under torch >= 2.9; it is not ours to mend.
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    # Lightning recommends other products.
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(lambda record: "Tip:" not in record.getMessage())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, load the checkpoint without a pipeline, and report.

    Raises:
        SystemExit: If the checkpoint has other scores without a pipeline.
    """
    options = parse(arguments)
    quieten()
    L.seed_everything(options.seed, verbose=False)
    canvases = options.steps * options.batch_size
    data = DigitsData(canvases, options.validation, options.batch_size, options.canvas)
    trainer, checkpoint, measurements = train(options, data)
    alone = L.Trainer(
        accelerator=options.accelerator, devices=1, logger=False, enable_progress_bar=False
    )
    scores = predict(alone, checkpoint, data)
    difference = (scores - predict(trainer, checkpoint, data)).abs().max().item()

    images, classes = map(torch.cat, zip(*data.val_dataloader(), strict=True))
    found = scores.argmax(dim=1)
    model = UNet.load_from_checkpoint(checkpoint, map_location="cpu")
    report = {
        "mean IoU": f"{model.mean_iou(found, classes):.3f}",
        "mean IoU of background everywhere": (
            f"{model.mean_iou(torch.full_like(classes, BACKGROUND), classes):.3f}"
        ),
        "Dice": f"{model.dice(found, classes):.3f}",
        "images per second": f"{median(measurements.speeds):,.0f}",
    }
    console = Console()
    if measurements.stages is not None:
        console.print(measurements.stages)
        timelines = measurements.timelines
        report["bubble, measured"] = f"{median(timeline.bubble for timeline in timelines):.1%}"
        report["bubble, by the schedule"] = f"{timelines[-1].schedule.bubble:.1%}"
    report["largest difference to the scores of a plain Trainer"] = f"{difference:.1e}"
    table = Table(show_header=False)
    for name, value in report.items():
        table.add_row(name, value)
    console.print(table)
    folder = Path(checkpoint).parents[1]
    contact_sheet(images[:6], classes[:6], found[:6]).savefig(folder / "contact_sheet.png", dpi=120)
    console.print(f"Logs, checkpoint and contact sheet: {folder}", soft_wrap=True)
    if difference > 1e-3:
        raise SystemExit(f"scores without a pipeline must be the same: they differ by {difference}")


if __name__ == "__main__":
    main()
