"""Draws pictures of "How it works" and "Monitoring": ``python docs/site/pictures.py [NAME...]``.

Run it on two idle cores. A picture of "How it works" is the mini-batch of median length; that of
"Monitoring", ``timeline``, is the file that PipelineMonitor writes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each stage

import lightning as L
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy, PipelineMonitor
from lightning_gpipe.core.show import timeline_picture

DOCS = Path(__file__).parents[1]
WIDTH, ROWS, ROUNDS = 640, 1024, 25
SIZE = 5.4, 2.9  # inches: legible on 400 pixels

PICTURES: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "one_chunk": ("chunks=1", [4, 4], {"chunks": 1, "activation_checkpointing": "never"}),
    "chunks": ("chunks=8", [4, 4], {"chunks": 8, "activation_checkpointing": "never"}),
    "recomputed": ("activation_checkpointing='except_last'", [4, 4], {"chunks": 8}),
    "unequal": ("balance=[6, 2]", [6, 2], {"chunks": 8, "activation_checkpointing": "never"}),
}


def layers(count: int = 8) -> nn.Sequential:
    """Layers that all take equally long."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def draw(name: str, title: str, balance: list[int], options: dict[str, Any]) -> None:
    """Run some mini-batches, and draw the one of median length."""
    model = GPipe(layers(), balance, devices=["cpu"] * 2, threads=True, **options)
    runs = []
    for _ in range(ROUNDS):
        x = torch.randn(ROWS, WIDTH)
        model(x).square().mean().backward()
        assert model.timeline is not None
        spans = list(model.timeline.spans)
        length = max(span.end for span in spans) - min(span.start for span in spans)
        runs.append((length, model.timeline.bubble, spans))
    model.close()
    length, bubble, spans = sorted(runs[3:], key=lambda run: run[0])[len(runs[3:]) // 2]
    note = f"{1000 * length:.0f} ms, {bubble:.0%} of the time idle"
    workers = [f"stage {j}" for j in range(len(balance))]
    figure = timeline_picture(spans, workers, title=title, note=note)
    figure.set_size_inches(*SIZE)
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None, "there are several kinds of actions"
    legend.remove()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(DOCS / "pictures" / f"{name}.png", dpi=200)
    print(f"{name}: {note}")


class Net(L.LightningModule):
    """Trains the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def draw_monitored() -> None:
    """Copy the picture of a PipelineMonitor of two unequal stages."""
    with TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=GPipeStrategy([5, 3], chunks=8, threads=True),
            callbacks=[PipelineMonitor(every_n_steps=1, folder=folder)],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8 * ROWS, WIDTH), ROWS))
        picture = Path(folder) / "pipeline_timeline.png"
        (DOCS / "guide" / "timeline.png").write_bytes(picture.read_bytes())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for key in sys.argv[1:] or [*PICTURES, "timeline"]:
        if key == "timeline":
            draw_monitored()
        else:
            draw(key, *PICTURES[key])
