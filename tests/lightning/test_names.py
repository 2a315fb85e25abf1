"""How a user may name the strategy, and what is said where that is no name of it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from docs.site import errors
from lightning_gpipe import GPipe, GPipeStrategy, Rows
from tests.support.lightning_modules import fitted


@pytest.mark.parametrize(
    "strategy, expected",
    [
        (GPipeStrategy(), "GPipeStrategy()"),
        (GPipeStrategy([2, 4], 8), "GPipeStrategy(balance=[2, 4], chunks=8)"),
        (
            GPipeStrategy("time", module="net.layers", activation_checkpointing="never"),
            "GPipeStrategy(balance='time', module='net.layers', activation_checkpointing='never')",
        ),
        (
            GPipeStrategy(microbatching=Rows(dim=1), threads=False),
            "GPipeStrategy(microbatching=Rows(at_least=1, dim=1), threads=False)",
        ),
        (
            GPipeStrategy(processes="per_stage", lost_after=timedelta(seconds=9)),
            "GPipeStrategy(processes='per_stage', lost_after=datetime.timedelta(seconds=9))",
        ),
        (GPipeStrategy(ddp={}, replicas=2), "GPipeStrategy(replicas=2, ddp={})"),
    ],
    ids=str,
)
def test_repr_is_the_call(strategy: GPipeStrategy, expected: str) -> None:
    assert repr(strategy) == expected


def test_repr_of_a_subclass() -> None:
    class Mine(GPipeStrategy):
        def __init__(self) -> None:
            super().__init__([2, 4])

    assert repr(Mine()) == "Mine(balance=[2, 4])"


@pytest.mark.parametrize(
    "name", ["gpipe", "GPipe", "GPipeStrategy", "lightning_gpipe.GPipeStrategy"]
)
def test_name_of_the_strategy(tmp_path: Path, name: str) -> None:
    made = fitted(tmp_path, name, devices=2, max_steps=1, limit_val_batches=0)

    assert type(made.strategy) is GPipeStrategy
    assert StrategyRegistry.get(name.lower()) is not None


def test_class_instead_of_an_object() -> None:
    strategy: Any = GPipeStrategy

    with pytest.raises(
        ValueError, match=r"GPipeStrategy'>`. It must be either a string or an inst"
    ):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy)


def test_name_that_there_is_not() -> None:
    """The page of errors has Lightning's message, which does not list the names."""
    with pytest.raises(ValueError, match="invalid strategy name") as error:
        L.Trainer(accelerator="cpu", devices=2, strategy="gpipes")

    known = [message for message, _ in errors.OTHERS]
    assert any(str(error.value).startswith(message) for message in known)


def test_fabric_is_refused() -> None:
    strategy: Any = GPipeStrategy([2, 4])

    with pytest.raises(ValueError, match=r"=GPipeStrategy\(.*instance of `lightning.fabric"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy)


def test_pipeline_in_fabric() -> None:
    """The loss, gradients and weights of one step are those of the plain model in Fabric."""

    def stepped(pipelined: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=1)
        layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        made = GPipe(layers, [1, 2], devices=["cpu", "cpu"], chunks=2) if pipelined else layers
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        model, optimizer = fabric.setup(made, optimizer, move_to_device=False)
        loss = model(torch.ones(4, 6, dtype=torch.float64)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        if isinstance(made, GPipe):
            made.close()
        return dict(layers.state_dict())

    torch.testing.assert_close(stepped(pipelined=True), stepped(pipelined=False))


@pytest.mark.parametrize(
    "made",
    [partial(GPipeStrategy, [2, 4]), lambda: "gpipe", lambda: "lightning_gpipe.GPipeStrategy"],
)
def test_trainer_of_the_other_package_is_refused(made: Any) -> None:
    """Its classes are those of lightning.pytorch a second time."""
    other = pytest.importorskip("pytorch_lightning")

    with pytest.raises(ValueError, match="must be .* instance of `pytorch_lightning.strategies"):
        other.Trainer(accelerator="cpu", devices=2, strategy=made())
