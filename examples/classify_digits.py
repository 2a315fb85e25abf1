"""Which digit is it? An unchanged network of torchvision or timm, trained as a pipeline.

The networks of these libraries are not an `nn.Sequential`: a ResNet adds earlier activations, and a
DenseNet concatenates them. The pipeline traces the forward of the network and cuts it between the
calls of its layers; the network and the keys of its checkpoint do not change. One argument of the
Trainer, in `main`, makes the training a pipeline.

The digits are 1,797 scans of 8 x 8 pixels that come with scikit-learn. The final report compares
the accuracy with that of always predicting the most frequent digit. It also shows the speed, and
the loss of the saved checkpoint in a plain Trainer on one device.

    python -m examples.classify_digits                              # 2 stages on 2 CPU cores
    python -m examples.classify_digits --plain                      # the same, no pipeline
    python -m examples.classify_digits --network timm/resnet10t --accelerator gpu
"""

from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no stubs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy

Batch = tuple[Tensor, Tensor]  # images (rows, 3, size, size) and digits (rows,)

DIGITS = 10


class DigitsData(L.LightningDataModule):
    """Scans enlarged to `size` pixels, in three equal channels; the last fifth for validation.

    An epoch draws `training_scans` scans, or with None each one once.
    """

    def __init__(
        self, batch_size: int = 32, size: int = 32, training_scans: int | None = None
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.size = size
        self.training_scans = training_scans

    def setup(self, stage: str) -> None:
        scans, digits = load_digits(return_X_y=True)
        images = torch.tensor(scans, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        images = F.interpolate(images, size=self.size, mode="bilinear").expand(-1, 3, -1, -1)
        cut = len(images) * 4 // 5
        self.training = TensorDataset(images[:cut], torch.tensor(digits[:cut]))
        self.validation = TensorDataset(images[cut:], torch.tensor(digits[cut:]))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        sampler = RandomSampler(self.training, num_samples=self.training_scans)
        return DataLoader(self.training, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)


def network(name: str) -> nn.Module:
    """Return a network for ten classes, with random weights: `torchvision/...` or `timm/...`."""
    library, _, model = name.partition("/")
    made: nn.Module
    if library == "torchvision":
        from torchvision.models import get_model

        made = get_model(model, num_classes=DIGITS)
    elif library == "timm":
        from timm import create_model

        made = create_model(model, num_classes=DIGITS)
    else:
        raise ValueError(f"network must be torchvision/<model> or timm/<model>: got {name!r}.")
    return made


class Classifier(L.LightningModule):
    """A network of torchvision or timm that classifies digits."""

    def __init__(self, name: str = "torchvision/resnet18", learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = network(name)
        self.accuracy = MulticlassAccuracy(DIGITS, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, digits = batch
        loss = F.cross_entropy(self.network(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, digits = batch
        scores = self.network(images)
        self.accuracy(scores, digits)
        self.log("val_accuracy", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(scores, digits))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.learning_rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, and report."""
    parser = options_parser(__doc__, output="runs/classify_digits", batch_size=32, steps=200)
    parser.add_argument("--network", default="torchvision/resnet18", help="or timm/resnet10t ...")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    options = start(parser, arguments)

    data = DigitsData(options.batch_size, options.size, options.steps * options.batch_size)
    model = Classifier(options.network)

    # The pipeline. With the Trainer's default, strategy="auto", the same training is a plain one.
    strategy = GPipeStrategy(
        options.balance, options.chunks, module="network", activation_checkpointing="never"
    )

    best = ModelCheckpoint(filename="best", monitor="val_accuracy", mode="max")
    measurements = Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1,
        val_check_interval=min(50, options.steps),
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    digits = torch.cat([digits for _, digits in data.val_dataloader()])
    guess = {"val_accuracy": (digits == digits.mode().values).float().mean().item()}
    cost = measurements.cost("images", options.batch_size)
    report(trainer, model, data, best, guess, cost)


if __name__ == "__main__":
    main()
