"""What is told of a step that goes around the pipeline, and what is recorded, on several GPUs."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, GPipeStrategy
from tests.gpu.trainers import Deep, needs, piped
from tests.support.lightning_modules import Data, trainer
from tests.support.models import assert_same, perceptron, rows, step

pytestmark = needs(2)

GPUS = ["cuda:0", "cuda:1"]


class Loop(Deep):
    """Runs its layers one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_loop_over_layers_on_several_gpus_says_why_it_fails(tmp_path: Path) -> None:
    """PyTorch says only that tensors are on several devices."""
    with pytest.raises(RuntimeError) as error:
        piped(tmp_path, 2, build=Loop, num_sanity_val_steps=0)

    assert any("training_step must call Loop.layers" in note for note in error.value.__notes__)


class Scaled(nn.Sequential):
    """Layers with a parameter and a buffer of their own, which a hook uses."""

    shift: Tensor

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(3.0))
        self.register_forward_hook(Scaled.after)

    def after(self, x: Any, y: Tensor) -> Tensor:
        return y * self.scale + self.shift


@pytest.mark.parametrize("shared", [False, True])
def test_parameters_and_buffers_of_the_module_are_on_the_last_device(shared: bool) -> None:
    module = Scaled(*perceptron(4)).double()
    if shared:
        module.scale = module.get_parameter("0.bias")
    plain = deepcopy(module).to("cuda:0")

    pipeline = GPipe(module, [2, 2], devices=GPUS, chunks=3)
    found = step(pipeline, rows(7).detach().to("cuda:0"))
    pipeline.close()

    assert module.scale.device == module.shift.device == torch.device("cuda:1")
    expected = step(plain, rows(7).detach().to("cuda:0"))
    cpu = [{name: g.cpu() for name, g in each.gradients.items()} for each in (found, expected)]
    assert_same(cpu[0], cpu[1])


def test_pipeline_over_several_gpus_is_recorded() -> None:
    plain = perceptron(4)
    pipeline = GPipe(deepcopy(plain), [2, 2], devices=GPUS, chunks=3)
    x = rows(7).detach()

    exported = torch.export.export(pipeline, (x.to("cuda:0"),), strict=False).module()
    found = exported(x.to("cuda:0"))
    pipeline.close()

    assert found.device == torch.device("cuda:1")
    assert_same(found.detach().cpu(), plain(x).detach())


def test_second_pipeline_of_a_module_leaves_the_first_on_its_gpus(tmp_path: Path) -> None:
    class Validates(L.Callback):
        def on_train_batch_end(self, first: L.Trainer, model: Any, *_: Any) -> None:
            if first.global_step == 2:
                second = trainer(tmp_path, GPipeStrategy(), accelerator="gpu", devices=2)
                with pytest.raises(RuntimeError, match="one pipeline at a time"):
                    second.validate(model, datamodule=Data(), verbose=False)
                model.trainer = first

    made = piped(tmp_path, 2, callbacks=[Validates()])

    assert made.global_step == 9
