"""What is checked of an installation: ``make dist`` runs it where nothing but the wheel is."""

from __future__ import annotations

from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gpipe


class Model(L.LightningModule):
    """Learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(root: str, **options) -> dict[str, torch.Tensor]:
    """The weights after a fit."""
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(32, 4, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, data)
    return model.state_dict()


def main() -> None:
    """Check where the package is, its version, its types, its description, and a fit."""
    home = Path(lightning_gpipe.__file__).parent
    assert "site-packages" in home.parts, f"not the installed package: {home}"
    assert version("lightning-gpipe") == lightning_gpipe.__version__
    assert (home / "py.typed").exists()
    assert find_spec("tests") is None, "the wheel has more than the package"
    description = metadata("lightning-gpipe").json["description"]
    assert "](docs/" not in str(description), "a link that leads nowhere in a package index"
    with TemporaryDirectory() as root:
        plain = fitted(root, devices=1)
        pipelined = fitted(root, devices=2, strategy=lightning_gpipe.GPipeStrategy([2, 1], 4))
    torch.testing.assert_close(pipelined, plain)
    print(f"lightning-gpipe {lightning_gpipe.__version__} is installed, and trains as one device")


if __name__ == "__main__":
    main()
