"""A fit up to its second step, whose parts are timed, for ``benchmarks.time_to_first_step``.

    python -m benchmarks.fit_begins char time

It prints the seconds of each part as JSON: of the processor, which other programs change little.
Plain Lightning has the parts ``import``, ``build``, ``setup``, ``first step`` and ``second step``;
a pipeline also has ``import of lightning_gpipe`` and those of :data:`PARTS`, which are not part of
the others then. To build the model is none of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

# What a pipeline does before its first step, by the functions that do it.
PARTS = {
    "trace": ["lightning_gpipe.strategy.pipelined.piped_modules_of"],
    "rehearsal": [
        "lightning_gpipe.strategy.pipelined.entries_in",
        "lightning_gpipe.core.pipeline.choose.measuring.entries_with",
    ],
    "measuring": ["lightning_gpipe.core.pipeline.choose.measuring.profile_layers"],
    "planning": ["lightning_gpipe.core.pipeline.choose.planning.plan_for"],
}


class Clock:
    """The seconds of parts, without those of the parts within them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"import": 0.0}
        self._open = ["import"]
        self._since = 0.0  # when the process began

    def begin(self, part: str) -> None:
        """End the part that is open, and begin another."""
        self._count()
        self._open[-1] = part

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count a ``with`` block for a part of its own."""
        self._count()
        self._open.append(part)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = time.process_time()
        part = self._open[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, each call of which counts for the part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return call


def char() -> tuple[Any, Any]:
    """The model of ``make demo``."""
    import torch

    from examples.char_lm import SIZES, CharLM

    return CharLM(**SIZES["demo"]).layers, torch.randint(50, (32, 128))


def wide() -> tuple[Any, Any]:
    """Few operators with 67 million parameters, so that each pass over these counts."""
    import torch
    from torch import nn

    blocks = [(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(8)]
    return nn.Sequential(*(nn.Sequential(*block) for block in blocks)), torch.randn(256, 1024)


def gpt2() -> tuple[Any, Any]:
    """GPT-2 small of transformers, 124 million parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), torch.randint(50257, (8, 64))


def llama_1b() -> tuple[Any, Any]:
    """A Llama of sixteen blocks, on the meta device."""
    import torch

    from benchmarks.models import llama

    with torch.device("meta"):
        return llama(16, 2048, 32, tokens=128256), torch.zeros(8, 2048, dtype=torch.long)


def resnet50() -> tuple[Any, Any]:
    """ResNet-50 of torchvision, whose forward is traced."""
    import torch
    from torchvision.models import resnet50

    return resnet50(), torch.randn(16, 3, 64, 64)


MODELS = {"char": char, "wide": wide, "gpt2": gpt2, "llama": llama_1b, "resnet50": resnet50}
PATHS = {"gpt2": "model.transformer.h", "llama": "layers"}  # of what is piped


def main(model: str, way: str) -> None:
    """Time the parts of a fit.

    Args:
        model: A key of :data:`MODELS`.
        way: ``"plain"``, or what is left open: ``"time"``, the balance; ``"plan"``, the number of
            micro-batches, too.
    """
    clock = Clock()
    with suppress(ImportError):  # where torchvision is not installed, it is not needed
        importlib.import_module("tests.models.torchvision_operators")
    import lightning
    import torch

    torch.set_num_threads(1)
    with ExitStack() as stack:
        if way != "plain":
            with clock.within("import of lightning_gpipe"):
                importlib.import_module("lightning_gpipe")
            for part, paths in PARTS.items():
                for path in paths:
                    owner, _, name = path.rpartition(".")
                    function = getattr(importlib.import_module(owner), name)
                    stack.enter_context(patch(path, clock.wrapped(part, function)))
        clock.begin("build")
        module, x = MODELS[model]()
        clock.begin("setup")
        fit = on_meta if x.is_meta else in_trainer
        fit(module, x, way, PATHS.get(model), clock, lightning)
    print(json.dumps(clock.seconds))


def on_meta(module: Any, x: Any, way: str, path: str | None, clock: Clock, _: Any) -> None:
    """Plan for four devices, or run two steps in which nothing is computed."""
    if way != "plain":
        from lightning_gpipe import plan

        plan(module, x, 4, module=path, device="meta")
    for part in ("first step", "second step"):
        clock.begin(part)
        if way == "plain":
            loss_of(module(x)).backward()
    clock.begin("end")


def in_trainer(
    module: Any, x: Any, way: str, path: str | None, clock: Clock, lightning: Any
) -> None:
    """Fit two steps."""
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.model(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Times(lightning.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock.begin("first step" if args[-1] == 0 else "second step")

        def on_train_batch_end(self, *args: Any) -> None:
            clock.begin("end")

    strategy: Any = "auto"
    if way != "plain":
        from lightning_gpipe import GPipeStrategy

        strategy = GPipeStrategy("time", "auto" if way == "plan" else 4, module=path)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x.repeat_interleave(2, 0)), len(x)
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if way == "plain" else 2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        callbacks=[Times()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)


def loss_of(outputs: Any) -> Any:
    """A loss of what a model returns."""
    scores = getattr(outputs, "logits", outputs)
    return scores.float().square().mean()


if __name__ == "__main__":
    main(*sys.argv[1:])
