"""Which digit does each pixel belong to? A U-Net, trained as a pipeline with skip connections.

A U-Net halves the resolution several times, and doubles it again. On the way up it needs the
*detail* of each resolution, a tensor of an early layer that a late layer uses. In a pipeline, these
two layers are usually on different devices: `Shrink` stashes the detail, `Enlarge` pops it, and it
is sent directly from one stage to the other. The layers are the children of one flat
`nn.Sequential` in an ordinary LightningModule. One argument of the Trainer, in `main`, makes the
training a pipeline.

The digits are 1,797 scans of 8 x 8 pixels that come with scikit-learn, scattered over larger, noisy
canvases in several sizes. The final report compares the mean intersection over union (IoU) with
that of predicting background everywhere. It also shows the speed, and the loss of the saved
checkpoint in a plain Trainer on one device.

    python -m examples.unet_segmentation            # 2 stages on 2 CPU cores, about 3 minutes
    python -m examples.unet_segmentation --plain    # the same model on one device, no pipeline
    python -m examples.unet_segmentation --accelerator gpu --width 64 --canvas 96
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no stubs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.skip.declare import Namespace, isolate, with_skips

Batch = tuple[Tensor, Tensor]  # images (rows, 1, height, width) and classes (rows, height, width)

BACKGROUND = 10  # the class of a pixel that belongs to no digit; classes 0 to 9 are the digits
CLASSES = 11
INK = 0.4  # a pixel with more ink belongs to the digit


@dataclass
class Canvases(Dataset[Batch]):
    """Canvases with some of the `scans` on them, `size` pixels high and wide.

    Each of the `numbers` is the seed of one canvas.
    """

    scans: Tensor
    digits: Tensor
    numbers: range
    size: int = 48
    noise: float = 0.2

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> Batch:
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


class DigitsData(L.LightningDataModule):
    """Canvases of the first four fifths of the scans for training, of the others for validation."""

    def __init__(self, canvases: int = 16_000, batch_size: int = 32, size: int = 48) -> None:
        super().__init__()
        self.canvases = canvases
        self.batch_size = batch_size
        self.size = size

    def setup(self, stage: str) -> None:
        found = load_digits()
        scans = torch.tensor(found.images / 16, dtype=torch.float32)  # ink from 0 to 1
        digits = torch.tensor(found.target)
        cut = len(scans) * 4 // 5
        self.training = Canvases(scans[:cut], digits[:cut], range(self.canvases), self.size)
        numbers = range(10**6, 10**6 + 256)  # other canvases than in training
        self.validation = Canvases(scans[cut:], digits[cut:], numbers, self.size)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.training, self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.validation, self.batch_size)


class Convolution(nn.Module):
    """A 3 x 3 convolution, a batch norm and a ReLU."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolve(x)))


@with_skips(stash=["detail"])
class Shrink(nn.Module):
    """Halves the resolution, and stashes its input as the detail."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.max_pool2d(x, 2), {"detail": x}


@with_skips(pop=["detail"])
class Enlarge(nn.Module):
    """Doubles the resolution, and concatenates the detail of that resolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2)

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
        own = Namespace()
        shrink, enlarge = isolate(Shrink(), own), isolate(Enlarge(2 * here, here), own)
        down += [Convolution(before, here), Convolution(here, here), shrink]
        up = [enlarge, Convolution(2 * here, here), Convolution(here, here), *up]
        before = here
    middle = [Convolution(before, 2 * before), Convolution(2 * before, 2 * before)]
    return nn.Sequential(*down, *middle, *up)


class UNet(L.LightningModule):
    """A U-Net with `width` channels at full resolution, which it halves `levels` times."""

    def __init__(self, width: int = 12, levels: int = 3, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.layers = u_net(width, levels)
        self.mean_iou = MulticlassJaccardIndex(CLASSES)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self.layers(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, classes = batch
        scores = self.layers(images)
        self.mean_iou(scores, classes)
        self.log("val_mean_iou", self.mean_iou, prog_bar=True)
        self.log("val_loss", F.cross_entropy(scores, classes))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.learning_rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, and report."""
    parser = options_parser(
        __doc__, output="runs/unet_segmentation", balance=[11, 10], batch_size=32, steps=500
    )
    parser.add_argument("--width", type=int, default=12, help="channels at full resolution")
    parser.add_argument("--canvas", type=int, default=48, help="pixels: 24, 32, 40 ...")
    options = start(parser, arguments)

    canvases = options.steps * options.batch_size
    data = DigitsData(canvases, batch_size=options.batch_size, size=options.canvas)
    model = UNet(options.width)

    # The pipeline. With the Trainer's default, strategy="auto", the same training is a plain one.
    strategy = GPipeStrategy(options.balance, options.chunks, activation_checkpointing="never")

    best = ModelCheckpoint(filename="best", monitor="val_mean_iou", mode="max")
    measurements = Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1,
        val_check_interval=min(100, options.steps),
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    classes = torch.cat([classes for _, classes in data.val_dataloader()])
    background = torch.full_like(classes, BACKGROUND)
    guess = {"val_mean_iou": MulticlassJaccardIndex(CLASSES)(background, classes).item()}
    cost = measurements.cost("images", options.batch_size)
    report(trainer, model, data, best, guess, cost)


if __name__ == "__main__":
    main()
