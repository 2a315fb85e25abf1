"""Steps in backward: the weights of steps after it, taken while other stages still run."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_gpipe import GPipeStrategy, StepInBackward
from tests.support.lightning_modules import (
    CLASSES,
    FEATURES,
    WIDTH,
    Classifier,
    assert_same_weights,
    fitted,
    six_layers,
)

SECONDS = 20  # that one thread waits for another


def in_backward(root: Path, build: Any = Classifier, **options: Any) -> L.Trainer:
    strategy = GPipeStrategy([2, 2, 2], chunks=2, threads=options.pop("threads", "auto"))
    callbacks = [StepInBackward(), *options.pop("callbacks", ())]
    return fitted(root, strategy, build=build, devices=3, callbacks=callbacks, **options)


def assert_same_fit(one: L.Trainer, other: L.Trainer) -> None:
    """Both have the same weights and optimizer states, up to the order of sums."""
    assert_same_weights(one, other)
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (one, other)]
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("optimizer, scheduled", [("momentum", False), ("adam", True)])
def test_fit(
    tmp_path: Path, optimizer: str, scheduled: bool, accumulated: int, threads: bool
) -> None:
    build = partial(Classifier, optimizer, scheduled)
    options: Any = {"max_epochs": 3, "accumulate_grad_batches": accumulated}
    plain = fitted(tmp_path, build=build, **options)

    found = in_backward(tmp_path, build, threads=threads, **options)

    assert_same_fit(found, plain)
    assert not [x for x in threading.enumerate() if "step-in-backward" in x.name]


class Regularised(Classifier):
    """A loss that uses the weight of a stage directly, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + self.layers.get_parameter("2.weight").square().sum()


class Twice(Classifier):
    """A step with two passes through the pipeline."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        x, _ = batch
        return loss + self.layers(2 * x).square().mean()


class Hooked(Classifier):
    """A parameter with a hook that scales its gradient."""

    def on_fit_start(self) -> None:
        weight = self.layers.get_parameter("2.weight")
        self.handle = weight.register_hook(lambda gradient: 3 * gradient)

    def on_fit_end(self) -> None:
        self.handle.remove()


class Tied(Classifier):
    """Two stages with the same weight, and a frozen one."""

    def __init__(self) -> None:
        layers = six_layers()
        layers[4].weight = layers[2].weight
        layers[0].requires_grad_(False)
        super().__init__("adam", layers=layers)


@pytest.mark.parametrize("kind", [Regularised, Twice, Hooked, Tied])
def test_parameters_with_other_gradients(tmp_path: Path, kind: type[Classifier]) -> None:
    assert_same_fit(in_backward(tmp_path, kind), fitted(tmp_path, build=kind))


class Recording(torch.optim.SGD):
    """Plain SGD that records what each of its steps has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[list[torch.Size]] = []
        self.first = threading.Event()

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        here = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.steps.append([p.shape for p in here])
        super().step()
        self.first.set()
        return loss


class Awaits(nn.Module):
    """Lets its backward wait for the first step of the optimizer."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error
        self.optimizer: Recording | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(self.wait)
        return x

    def wait(self, gradient: Tensor) -> None:
        if self.optimizer is not None:
            assert self.optimizer.first.wait(SECONDS), "no stage was stepped"
            if self.error:
                raise RuntimeError(self.error)


class Waiting(Classifier):
    """A first stage whose backward waits for the first step."""

    def __init__(self, error: str = "") -> None:
        layers = [nn.Linear(FEATURES, WIDTH), Awaits(error), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        super().__init__(layers=nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH, bias=False)))

    def configure_optimizers(self) -> Any:
        optimizer = Recording(self.parameters(), lr=0.1)
        awaits = self.layers[1]
        assert isinstance(awaits, Awaits)
        awaits.optimizer = optimizer
        return optimizer


def waiting(root: Path, error: str = "") -> L.Trainer:
    strategy = GPipeStrategy([2, 2, 1], chunks=1, threads=True, verify=False)
    callbacks: Any = [StepInBackward()]
    return fitted(
        root,
        strategy,
        build=partial(Waiting, error),
        devices=3,
        callbacks=callbacks,
        max_epochs=1,
        limit_train_batches=1,
    )


def test_last_stage_is_stepped_before_the_first_has_ended(tmp_path: Path) -> None:
    found = waiting(tmp_path)

    optimizer = found.optimizers[0]
    assert isinstance(optimizer, Recording)
    last, *others, around = optimizer.steps
    assert last == [(WIDTH, WIDTH)]
    assert sorted(others) == [[(WIDTH, FEATURES), (WIDTH,)], [(WIDTH, WIDTH), (WIDTH,)]]
    assert around == [(CLASSES, WIDTH), (CLASSES,)]  # the head of the Classifier


def test_error_says_which_stages_were_stepped(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in the first stage") as error:
        waiting(tmp_path, "in the first stage")

    notes = " ".join(error.value.__notes__)
    assert re.search(r"has stepped the parameters of stages (1, )?2 in this step", notes)
    assert not [x for x in threading.enumerate() if "step-in-backward" in x.name]


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its parameter groups."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return loss


class Counted(Classifier):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.1)


def test_optimizer_that_counts_steps(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"each parameter by itself: Counting changes its"):
        in_backward(tmp_path, Counted)


class InAttribute(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class CountedInAttribute(Classifier):
    def configure_optimizers(self) -> Any:
        return InAttribute(self.parameters(), lr=0.1)


def test_optimizer_that_counts_steps_in_an_attribute(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="InAttribute changes its attribute 'count' in a step"):
        in_backward(tmp_path, CountedInAttribute)


class Clips(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Keeps(Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


class Clipping(Precision):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        pass


class Looks(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Logs(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Stepped(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class OneVector(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    "module, options, got",
    [
        (OneVector, {}, "LBFGS, which joins parameters"),
        (Classifier, {"gradient_clip_val": 0.5}, "Trainer(gradient_clip_val=0.5)"),
        (Looks, {}, "Looks.on_before_optimizer_step"),
        (Classifier, {"callbacks": [Logs()]}, "Logs.on_after_backward"),
        (Clips, {}, "Clips.backward"),
        (Keeps, {}, "Keeps.optimizer_zero_grad"),
        (Classifier, {"plugins": [Clipping()]}, "Clipping.clip_gradients"),
        (Manual, {}, "manual optimization"),
        (Stepped, {}, "hooks of the optimizer's step"),
    ],
)
def test_refused(tmp_path: Path, module: Any, options: dict[str, Any], got: str) -> None:
    with pytest.raises(ValueError, match="before all gradients are there: got") as error:
        in_backward(tmp_path, module, **options)

    assert f"got {got}. Leave that out" in str(error.value)


def test_schedule_with_a_loss_for_each_micro_batch(tmp_path: Path) -> None:
    strategy = GPipeStrategy([3, 3], chunks=2, schedule="1f1b")
    callbacks: Any = [StepInBackward()]

    with pytest.raises(ValueError, match="got schedule='1f1b'"):
        fitted(tmp_path, strategy, devices=2, callbacks=callbacks)
