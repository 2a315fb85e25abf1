"""A U-Net of Hugging Face's diffusers, trained or fine-tuned as a pipeline.

To train such a network on two GPUs by hand, one moves the blocks of the way up to the second GPU,
and in a copy of the forward each tensor that they need, above all the skip connections. Only one of
the GPUs then works at a time. Here it is one argument of the Trainer, in `main`: the pipeline runs
the blocks that the unchanged forward loops over, on the way down and on the way up, and micro-
batches keep both devices busy. The training step is that of diffusers' guides.

Nothing is downloaded. `UNet2DConditionModel` is built from a config and learns to draw pieces of
the photographs that come with scikit-image. Its prompt is the name of a photograph: what a text
encoder would return is one letter per token. The run ends with the report of all examples, a
picture with samples, and a folder written by `save_pretrained`. `--pretrained` loads such a folder,
and `--lora` trains adapters of that rank, with peft, and saves them.

    pip install diffusers scikit-image peft
    python -m examples.finetune_diffusion               # 2 stages on 2 CPU cores, some minutes
    python -m examples.finetune_diffusion --plain       # the same, no pipeline
    python -m examples.finetune_diffusion --photographs moon,coins \
        --pretrained runs/finetune_diffusion/version_0/unet --lora 8
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from skimage import data as photographs
from skimage.color import rgb2gray
from skimage.io import imsave
from skimage.util import img_as_float32
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy

Batch = tuple[Tensor, Tensor]  # images (rows, 1, size, size) and prompts (rows, TOKENS, LETTERS)

LETTERS = 27  # and 0 for none
TOKENS = 10  # letters of the longest name


def photograph(name: str, size: int) -> Tensor:
    """Return a photograph of scikit-image in grey from -1 to 1, of (1, size, size)."""
    image = img_as_float32(getattr(photographs, name)())
    grey = rgb2gray(image) if image.ndim == 3 else image
    pixels = torch.tensor(grey)[None, None]
    return F.interpolate(pixels, (size, size), mode="area")[0] * 2 - 1


def prompt(name: str) -> Tensor:
    """Return a name as one-hot letters, of (TOKENS, LETTERS)."""
    letters = [ord(letter) - ord("a") + 1 for letter in name[:TOKENS].ljust(TOKENS, "`")]
    return F.one_hot(torch.tensor(letters), LETTERS).float()


def pieces(image: Tensor, count: int, size: int) -> Tensor:
    """Return `count` squares of `size` pixels from random places of an image."""
    generator = torch.Generator().manual_seed(0)  # the same ones in every run
    ends = [length - size + 1 for length in image.shape[1:]]
    rows, columns = (torch.randint(end, (count,), generator=generator).tolist() for end in ends)
    corners = zip(rows, columns, strict=True)
    return torch.stack([image[:, y : y + size, x : x + size] for y, x in corners])


class Photographs(L.LightningDataModule):
    """Pieces of photographs of scikit-image, with the names as prompts.

    An epoch has `steps` batches of pieces from the upper part of the photographs. The validation
    has two batches from the lower part.
    """

    def __init__(
        self,
        names: Sequence[str] = ("brick", "grass", "gravel"),
        batch_size: int = 16,
        size: int = 32,
        steps: int = 100,
    ) -> None:
        super().__init__()
        self.names = names
        self.batch_size = batch_size
        self.size = size
        self.steps = steps

    def setup(self, stage: str) -> None:
        images = [photograph(name, 6 * self.size) for name in self.names]
        cut = 6 * self.size * 3 // 4
        self.training = self.dataset([image[:, :cut] for image in images], self.steps)
        self.validation = self.dataset([image[:, cut:] for image in images], 2)

    def dataset(self, images: Sequence[Tensor], batches: int) -> TensorDataset:
        rows = batches * self.batch_size
        names = torch.arange(rows) % len(images)
        found = torch.empty(rows, 1, self.size, self.size)
        for k, image in enumerate(images):
            found[names == k] = pieces(image, int((names == k).sum()), self.size)
        return TensorDataset(found, torch.stack([prompt(name) for name in self.names])[names])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)


class Diffusion(L.LightningModule):
    """A U-Net that predicts the noise in an image, from a config or the folder `pretrained`.

    With `lora` > 0, only adapters of that rank are trained, in the attention of all blocks.
    """

    def __init__(
        self,
        size: int = 32,
        width: int = 32,
        learning_rate: float = 1e-3,
        pretrained: str | None = None,
        lora: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
        self.network: Any = (
            u_net(size, width)
            if pretrained is None
            else UNet2DConditionModel.from_pretrained(pretrained)
        )
        self.network.train()  # from_pretrained returns networks in evaluation mode
        if lora:
            add_adapters(self.network, lora)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, prompts = batch
        steps = self.scheduler.config.num_train_timesteps
        timesteps = torch.randint(steps, (len(images),), device=self.device)
        loss = self.loss(images, prompts, torch.randn_like(images), timesteps)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, prompts = batch
        generator = torch.Generator().manual_seed(batch_idx)  # the same noise in each validation
        noise = torch.randn(images.shape, generator=generator).to(images)
        last = self.scheduler.config.num_train_timesteps - 1
        timesteps = torch.linspace(0, last, len(images), device=self.device).long()
        self.log("val_loss", self.loss(images, prompts, noise, timesteps), prog_bar=True)

    def loss(self, images: Tensor, prompts: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        noisy = self.scheduler.add_noise(images, noise, timesteps)
        return F.mse_loss(self.network(noisy, timesteps, prompts).sample, noise)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, self.learning_rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def draw(self, names: Sequence[str], size: int, steps: int = 25) -> Tensor:
        """Return an image of each name, of (names, 1, size, size), from -1 to 1."""
        self.eval()
        scheduler = DDIMScheduler.from_config(self.scheduler.config)
        scheduler.set_timesteps(steps)
        images = torch.randn(len(names), 1, size, size, device=self.device)
        prompts = torch.stack([prompt(name) for name in names]).to(self.device)
        for step in scheduler.timesteps:
            noise = self.network(images, step, prompts).sample
            images = scheduler.step(noise, step, images).prev_sample
        return images.clamp(-1, 1)


def u_net(size: int, width: int) -> UNet2DConditionModel:
    """Return a U-Net with random weights: three blocks down, three blocks up."""
    return UNet2DConditionModel(
        sample_size=size,
        in_channels=1,
        out_channels=1,
        block_out_channels=(width, 2 * width, 2 * width),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=4,
        cross_attention_dim=LETTERS,
    )


def add_adapters(network: Any, rank: int) -> None:
    """Add LoRA adapters to the attention of a network, and freeze the rest."""
    from peft import LoraConfig

    network.requires_grad_(False)
    network.add_adapter(LoraConfig(r=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))


def save_samples(images: Tensor, file: Path) -> None:
    """Save images beside one another as one picture."""
    row = torch.cat(list(images[:, 0].cpu()), 1)
    imsave(file, ((row + 1) * 127.5).to(torch.uint8).numpy(), check_contrast=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, report, draw and save."""
    parser = options_parser(__doc__, output="runs/finetune_diffusion", batch_size=16, steps=300)
    parser.add_argument("--photographs", default="brick,grass,gravel", help="of scikit-image")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--width", type=int, default=32, help="channels of the first block")
    parser.add_argument("--pretrained", help="a folder with weights")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters; 0: train all weights"
    )
    options = start(parser, arguments)

    names = options.photographs.split(",")
    data = Photographs(names, options.batch_size, options.size, options.steps)
    model = Diffusion(options.size, options.width, pretrained=options.pretrained, lora=options.lora)

    # The pipeline: the blocks down, then the blocks up, each on all devices.
    strategy = GPipeStrategy(
        options.balance,
        options.chunks,
        module=["network.down_blocks", "network.up_blocks"],
        activation_checkpointing="never",
    )

    best, measurements = ModelCheckpoint(filename="best", monitor="val_loss"), Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1,
        val_check_interval=min(100, options.steps),
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    guess = {"val_loss": 1.0}  # of no noise at all
    cost = measurements.cost("images", options.batch_size)
    reloaded = report(trainer, model, data, best, guess, cost)

    folder = Path(str(trainer.log_dir))
    save_samples(reloaded.draw(names * 3, options.size), folder / "samples.png")
    save = reloaded.network.save_lora_adapter if options.lora else reloaded.network.save_pretrained
    save(folder / ("adapters" if options.lora else "unet"))
    print(f"Samples and weights: {folder}")


if __name__ == "__main__":
    main()
