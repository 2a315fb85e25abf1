"""What a LightningModule offers to its own code gives in a pipeline what it gives plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_gpipe import GPipeStrategy
from tests.lightning.features.run import close, described
from tests.support.lightning_modules import FEATURES, Classifier, fitted, weights

X = torch.linspace(-1, 1, 5 * FEATURES, dtype=torch.float64).reshape(5, FEATURES)


def toggled(module: L.LightningModule) -> Any:
    """Which parameters are trained while an optimizer is toggled, and after."""
    optimizer: Any = module.optimizers()
    module.toggle_optimizer(optimizer)
    within = [parameter.requires_grad for parameter in module.parameters()]
    module.untoggle_optimizer(optimizer)
    return within, [parameter.requires_grad for parameter in module.parameters()]


def within_toggled(module: L.LightningModule) -> Any:
    """Which parameters are trained within the context manager."""
    if "toggled_optimizer" not in dir(module):
        pytest.skip("new in Lightning 2.6")
    with module.toggled_optimizer(module.optimizers()):  # type: ignore[arg-type]  # one optimizer
        return [parameter.requires_grad for parameter in module.parameters()]


def frozen(module: L.LightningModule) -> Any:
    """Which parameters are trained once all are frozen, and thawed."""
    module.freeze()
    within = [parameter.requires_grad for parameter in module.parameters()], module.training
    module.unfreeze()
    return within, [parameter.requires_grad for parameter in module.parameters()], module.training


def clipped(module: L.LightningModule) -> Any:
    """The gradients after they are clipped."""
    module.clip_gradients(module.optimizers(), 0.01, "norm")  # type: ignore[arg-type]  # one optimizer
    return [parameter.grad for parameter in module.parameters()]


def logs(module: L.LightningModule) -> Any:
    """What callbacks see of what is logged here."""
    module.log("one", torch.tensor(1.0))
    module.log_dict({"two": 2.0, "three": torch.tensor(3.0)})
    return True


def attribute(name: str) -> Callable[[L.LightningModule], Any]:
    """What an attribute is."""
    return lambda module: described(getattr(module, name))


# Called where gradients are there and the pipeline is: on_before_optimizer_step.
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda module: module.all_gather({"x": torch.ones(2), "y": 3.0}),
    "clip_gradients": clipped,
    "configure_gradient_clipping": lambda module: module.configure_gradient_clipping(
        module.optimizers(), 0.01, "value"
    ),
    "forward": lambda module: module(X),
    "freeze": frozen,
    "log": logs,
    "lr_schedulers": lambda module: type(module.lr_schedulers()).__name__,
    "optimizers": lambda module: type(module.optimizers()).__name__,
    "print": lambda module: module.print("words"),
    "toggle_optimizer": toggled,
    "toggled_optimizer": within_toggled,
    **{
        name: attribute(name)
        for name in (
            "automatic_optimization",
            "current_epoch",
            "device_mesh",
            "example_input_array",
            "fabric",
            "global_rank",
            "global_step",
            "local_rank",
            "logger",
            "loggers",
            "on_gpu",
            "strict_loading",
            "trainer",
        )
    },
}


def called(root: Path, name: str, **options: Any) -> tuple[L.Trainer, list[Any]]:
    """A fit in which the module calls something of its own, and what that returned."""

    class Calls(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            results.append(CALLS[name](self))

    def build() -> Calls:
        module = Calls(scheduled=True)
        module.example_input_array = X
        return module

    results: list[Any] = []
    return fitted(root, build=build, max_epochs=1, **options), results


@pytest.mark.parametrize("name", CALLS)
def test_call(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, expected = called(tmp_path, name)
    printed = capsys.readouterr().out

    piped, found = called(tmp_path, name, strategy=GPipeStrategy([2, 4], 3), devices=2)

    assert capsys.readouterr().out == printed
    close(found, expected)
    close(weights(piped), weights(plain))
    close(piped.callback_metrics, plain.callback_metrics)


class Overrides(Classifier):
    """Has the hooks of optimization of its own, and notes their calls."""

    def __init__(self) -> None:
        super().__init__(scheduled=True)
        self.calls: list[Any] = []

    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        self.calls.append(("backward", described(loss), described(args)))
        super().backward(2 * loss, *args, **options)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any) -> None:
        self.calls.append(("optimizer_step", epoch, batch_idx, described(args)))
        super().optimizer_step(epoch, batch_idx, *args)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.calls.append(("optimizer_zero_grad", described(args)))
        super().optimizer_zero_grad(*args)

    def lr_scheduler_step(self, *args: Any) -> None:
        self.calls.append(("lr_scheduler_step", described(args)))
        super().lr_scheduler_step(*args)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.calls.append(("configure_gradient_clipping", described(args), described(options)))
        self.clip_gradients(optimizer, 0.02, "norm")

    def configure_callbacks(self) -> Any:
        self.calls.append(("configure_callbacks",))
        return [L.pytorch.callbacks.EarlyStopping("val_loss", patience=9)]

    def configure_optimizers(self) -> Any:
        self.calls.append(("configure_optimizers",))
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("training_step", described(batch), batch_idx))
        return {"loss": super().training_step(batch, batch_idx), "more": torch.ones(1)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("validation_step", described(batch), batch_idx))
        return super().validation_step(batch, batch_idx)


OVERRIDDEN = [
    name for name, value in vars(Overrides).items() if callable(value) and not name.startswith("_")
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[L.Trainer, L.Trainer]:
    """A plain and a pipelined fit of a module that overrides them all."""
    root = tmp_path_factory.mktemp("overrides")
    strategy = GPipeStrategy([2, 4], chunks=3)
    plain = fitted(root, build=Overrides)
    return plain, fitted(root, strategy, build=Overrides, devices=2)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_override(both: tuple[L.Trainer, L.Trainer], name: str) -> None:
    modules: list[Any] = [made.lightning_module for made in both]
    expected, found = ([call for call in each.calls if call[0] == name] for each in modules)

    assert expected
    assert found == expected
    close(*(weights(made) for made in both))


def test_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    piped = fitted(tmp_path, GPipeStrategy([2, 4], 3), devices=2, max_epochs=1)
    piped.save_checkpoint(tmp_path / "end.ckpt")

    loaded = Classifier.load_from_checkpoint(tmp_path / "end.ckpt")

    close(dict(loaded.state_dict()), weights(piped))
