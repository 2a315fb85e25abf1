"""Lightning's examples run as they are: most of their work is piped, or they say what to write."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos import Transformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_examples import (
    EXAMPLES,
    GAN,
    PPO,
    ROWS,
    AutoEncoder,
    Boring,
    DeepQ,
    Example,
    ImageClassifier,
    ImageNet,
    LanguageModel,
    Segmentation,
    TransferLearning,
)
from tests.support.lightning_modules import trainer

PIPED = {
    AutoEncoder: ["encoder", "decoder"],
    DeepQ: ["net.net", "target_net.net"],
    GAN: ["generator.model", "discriminator.model"],
    ImageClassifier: ["backbone"],
    ImageNet: ["model"],
    PPO: ["critic", "actor.actor_net"],
    Segmentation: ["net.layers"],
    TransferLearning: ["feature_extractor"],
}
REFUSED = {Boring: "Boring must hold layers to pipeline", LanguageModel: "LanguageModel"}


class Losses(L.Callback):
    """Keeps what each step logs."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.values.append(trainer.callback_metrics["train_loss"].clone())


def fitted(root: Path, example: type[Example], **options: Any) -> list[Any]:
    """The losses of two steps, and the weights after them."""
    torch.manual_seed(0)
    model, losses = example().double(), Losses()
    made = trainer(root, callbacks=[losses], precision="64-true", max_epochs=1, **options)
    torch.manual_seed(1)
    made.fit(model)
    return [losses.values, {n: p for n, p in model.state_dict().items() if "running" not in n}]


def without_batch_norms(model: nn.Module) -> bool:
    return not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


@pytest.mark.parametrize("example", PIPED, ids=lambda example: example.__name__)
def test_example_is_the_same_but_for_the_strategy(tmp_path: Path, example: type[Example]) -> None:
    strategy = GPipeStrategy(chunks=2)

    found = fitted(tmp_path, example, strategy=strategy, devices=2)

    if without_batch_norms(example()):
        torch.testing.assert_close(found, fitted(tmp_path, example), rtol=1e-9, atol=1e-11)
    assert all(torch.isfinite(loss) for loss in found[0]) and len(found[0]) == 2


def share(model: Example, parts: list[nn.Module]) -> float:
    """The share of the floating-point operations of a loss that these parts have."""
    inside = 0
    started: list[int] = []
    with FlopCounterMode(display=False) as counter, ExitStack() as stack:

        def begin(*_: Any) -> None:
            started.append(counter.get_total_flops())

        def end(*_: Any) -> None:
            nonlocal inside
            inside += counter.get_total_flops() - started.pop()

        for part in parts:
            for called in part if isinstance(part, nn.ModuleList) else [part]:
                stack.callback(called.register_forward_pre_hook(begin).remove)
                stack.callback(called.register_forward_hook(end).remove)
        model.loss(*(tensor[:ROWS] for tensor in model.data()))
    return inside / counter.get_total_flops()


@pytest.mark.parametrize("example", PIPED, ids=lambda example: example.__name__)
def test_most_of_the_work_is_piped(example: type[Example]) -> None:
    model = example()

    paths = [piped.path for piped in GPipeStrategy().piped_modules(model)]

    assert paths == PIPED[example]
    assert share(model, [model.get_submodule(path) for path in paths]) >= 0.9


@pytest.mark.parametrize("example", REFUSED, ids=lambda example: example.__name__)
def test_example_without_much_to_pipe_says_what_to_write(
    tmp_path: Path, example: type[Example]
) -> None:
    if example is LanguageModel and not hasattr(Transformer, "generate_square_subsequent_mask"):
        pytest.skip("before Lightning 2.6 it keeps no mask")
    with pytest.raises(ValueError, match=REFUSED[example]) as error:
        trainer(tmp_path, GPipeStrategy(), devices=2).fit(example())

    assert "self.layers = nn.Sequential(...)" in str(error.value) or "module=" in str(error.value)


def test_all_examples_are_tried() -> None:
    assert {*PIPED, *REFUSED} == {*EXAMPLES}
