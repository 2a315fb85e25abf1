"""torch.compile within a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy
from tests.support.compilation import counting, has_dynamo
from tests.support.lightning_modules import Classifier, assert_same_weights, fitted, six_layers

pytestmark = [
    pytest.mark.skipif(not has_dynamo(), reason="needs torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile looks
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]


class Body(nn.Module):
    """Runs its layers as a whole, or one by one."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        self.layers = six_layers()
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        if not self.loop:
            return self.layers(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x.sin()


class Compiled(Classifier):
    """A module that is compiled, with the layers to pipeline within it."""

    def __init__(self, loop: bool = False, compiled: bool = True) -> None:
        super().__init__(layers=nn.Sequential())
        del self.layers
        self.body = Body(loop).double()
        if compiled:
            self.body.compile(backend=counting([]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_compiled_module_around_the_pipeline(tmp_path: Path) -> None:
    """Once Dynamo crashed in the engine."""
    plain = fitted(tmp_path, build=lambda: Compiled(compiled=False))
    strategy = GPipeStrategy([2, 4], chunks=3)

    pipelined = fitted(tmp_path, strategy, build=Compiled, devices=2)

    assert_same_weights(pipelined, plain)


def test_compiled_loop_goes_around_the_pipeline(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 4], chunks=3)
    options: dict[str, Any] = {"devices": 2, "num_sanity_val_steps": 0}

    with pytest.raises(RuntimeError, match=r"training_step must call Compiled.body.layers"):
        fitted(tmp_path, strategy, build=lambda: Compiled(loop=True), **options)
