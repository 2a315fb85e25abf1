"""What models may do over processes: the numbers are those of one process, to the bit."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stdout
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.functional import accuracy

from lightning_gpipe import GPipe
from tests.support.lightning_modules import CLASSES, Classifier, Data
from tests.support.models import rows
from tests.support.processes import assert_equal, processes
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over
from tests.support.two_stacks import Translator

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Late(Translator):
    """Steps by itself, clips, and counts with a metric that it makes after setup."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def on_fit_start(self) -> None:
        self.total = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()
        self.total(len(batch[0]))
        self.log("total", self.total, on_step=False, on_epoch=True)
        found = accuracy(self(batch[0]).detach(), batch[1], "multiclass", num_classes=CLASSES)
        self.log("again", found)
        return loss.detach()


def fit_twice(root: Path, mode: str) -> dict[str, Any]:
    """Two fits and a validation of one Trainer, of a model with two pipelines."""
    torch.manual_seed(0)
    model = Late()
    strategy = {"module": ["layers.encoder", "layers.decoder"]}
    made = trainer_over(root, mode, [[1, 2], [2, 2]], strategy, max_epochs=1)
    made.fit(model, datamodule=Data())
    made.fit_loop.max_epochs = 2
    made.fit(model, datamodule=Data())
    return {
        "logged": {name: float(x) for name, x in made.callback_metrics.items()},
        "validated": made.validate(model, Data(), verbose=False),
        "parameters": {n: p.detach() for n, p in model.named_parameters() if not p.is_meta},
    }


def test_two_pipelines_that_a_model_steps_itself_in_two_fits(
    tmp_path: Path, two_ranks: Pool
) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = fit_twice(tmp_path, "single")

    found = two_ranks.run(fit_twice, tmp_path, "per_stage")

    parameters = expected.pop("parameters")
    for each in found:
        own = each.pop("parameters")
        assert_equal(own, {name: parameters[name] for name in own})
        assert_equal(each, expected)
    assert expected["logged"]["total"] == 20


OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "Adam foreach": {"foreach": True},
    "Adam one by one": {"foreach": False},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


def step_with_each(owners: tuple[int, ...] | None) -> dict[str, dict[str, Tensor]]:
    """The parameters after steps with each optimizer, and what it keeps of them."""
    found = {}
    for name, options in OPTIMIZERS.items():
        torch.manual_seed(1)
        layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
        pipeline = GPipe(layers, [1, 3], devices=["cpu"] * 2, chunks=2, **processes(owners))
        kind = getattr(torch.optim, name.partition(" ")[0])
        optimizer = kind(pipeline.parameters(), **options)
        for k in range(3):
            optimizer.zero_grad()
            pipeline(rows(4, seed=k)).square().mean().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        pipeline.close()
        named = {n: p.detach() for n, p in pipeline.named_parameters() if not p.is_meta}
        kept = {
            f"{k} {key}": x
            for k, parameter in enumerate(pipeline.parameters())
            if not parameter.is_meta  # Adagrad makes a state of each when it is made
            for key, x in optimizer.state[parameter].items()
        }
        found[name] = {**named, **kept}
    return found


def test_optimizers_that_update_each_parameter_by_itself(two_ranks: Pool) -> None:
    expected = step_with_each(None)

    one, other = two_ranks.run(step_with_each, (0, 1))

    for name, values in expected.items():
        assert not set(one[name]) & set(other[name]), name
        found = {**one[name], **other[name]}
        assert_equal({key: found[key] for key in values}, values)


def lines_at_setup(root: Path, processes: str, build: Any, balance: Any, options: Any) -> list[str]:
    """What this process prints of how its pipelines were cut."""
    handler = BufferingHandler(capacity=10_000)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer_over(root, processes, balance, options, max_steps=1).fit(build(), Data())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    messages = [record.getMessage() for record in handler.buffer]
    return [line for text in messages if "as a pipeline" in text for line in text.splitlines()]


@pytest.mark.parametrize(
    "build, balance, options, expected",
    [
        (
            Classifier,
            [2, 4],
            {},
            [
                "GPipe runs Classifier.layers (Sequential) as a pipeline: layers 0..1 on cpu of "
                "rank 0, layers 2..5 on cpu of rank 1; around, on cpu: 27 parameters, 12% of all."
            ],
        ),
        (
            Translator,
            [[1, 2], [2, 2]],
            {"module": ["layers.encoder", "layers.decoder"]},
            [
                "GPipe runs Translator.layers.encoder (ModuleList) as a pipeline: layers.encoder.0 "
                "on cpu of rank 0, layers.encoder.1..2 on cpu of rank 1.",
                "GPipe runs Translator.layers.decoder (ModuleList) as a pipeline: "
                "layers.decoder.0..1 on cpu of rank 0, layers.decoder.2..3 on cpu of rank 1; "
                "around, on cpu: 83 parameters, 14% of all.",
            ],
        ),
    ],
    ids=["layers", "several"],
)
def test_the_line_at_setup_has_the_stages_of_all_processes(
    tmp_path: Path, two_ranks: Pool, build: Any, balance: Any, options: Any, expected: list[str]
) -> None:
    """Once the first process printed its own stages as if there were no others.

    Of several modules, the line of the first one had the stages of all.
    """
    first, second = two_ranks.run(lines_at_setup, tmp_path, "per_stage", build, balance, options)

    assert first == expected
    assert not second


def printed_by_time(root: Path) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        trainer_over(root, "per_stage", "time", {}, max_steps=1).fit(Classifier(), Data())
    return printed.getvalue()


def test_the_table_of_a_measured_balance_is_printed_once(tmp_path: Path, two_ranks: Pool) -> None:
    """Once each process printed it."""
    first, second = two_ranks.run(printed_by_time, tmp_path)

    assert "stage" in first
    assert not second
