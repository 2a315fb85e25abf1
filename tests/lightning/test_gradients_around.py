"""With outputs for the last stage, parameters around the pipeline live where they are used.

Fits end as in one process, and no other process has, steps or is sent such a parameter. That is
what ``gradients_around`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning.test_last_outputs import assert_close, check_fit
from tests.lightning.test_processes import checkpoint
from tests.lightning.test_replicas import Halves
from tests.lightning.test_schedules_over_processes import FOLDED
from tests.support.lightning_modules import Classifier, Data, trainer
from tests.support.ranks import Pool, Ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Ends(Classifier):
    """Uses parameters before its call, after it, on both sides, later, and never."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.tail = nn.GRU(3, 3, batch_first=True)  # which all keep
        self.enter = nn.Linear(6, 6)
        self.both = nn.Parameter(torch.ones(6))
        self.later = nn.Linear(3, 3)
        self.never = nn.Linear(2, 2)
        self.enter.bias.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.enter(x) * self.both)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output: Tensor = self.tail(self(x)[:, None])[0][:, 0]
        if self.current_epoch:
            output = self.later(output)
        loss: Tensor = F.cross_entropy(output, y) + 0.1 * self.both.square().sum()
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self) -> None:
        self.enter.bias.requires_grad_(self.current_epoch > 0)


class Keeping(Ends):
    """Keeps gradients, to which each step adds."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class Loop(nn.Module):
    """Calls layers one by one, and uses a parameter between them."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = block(x) * self.scale if k == 1 else block(x)
        return x


class Looped(Ends):
    """Loops over its layers."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.layers: Any = Loop(self.layers)


LAST = {"head.weight", "head.bias", "later.weight", "later.bias"}  # used after the call only
TAIL = {f"tail.{kind}_{gate}_l0" for kind in ("weight", "bias") for gate in ("ih", "hh")}  # in all
FIRST = {"enter.weight", "enter.bias", "both"}
NEVER = {"never.weight", "never.bias"}


def on_meta(model: nn.Module) -> set[str]:
    """The names of the parameters around the pipeline that are not in this process."""
    named = model.named_parameters()
    return {name for name, x in named if x.is_meta and not name.startswith("layers.")}


def places(root: Path, kind: type[Ends], stages: int) -> Any:
    """What is on meta after a fit, what has a state, and what is on meta in a test after it."""
    model = kind()
    strategy = {"outputs": "last", "chunks": 2, "verify": False}
    options = {"max_epochs": 2, "limit_train_batches": 2}
    made = trainer_over(root, "per_stage", [6 // stages] * stages, strategy, (stages, 1), **options)
    made.fit(model, datamodule=Data())
    named = {name: x for name, x in model.named_parameters() if not name.startswith("layers.")}
    [optimizer] = made.optimizers
    states = {name for name, x in named.items() if x in optimizer.state}
    found = on_meta(model)
    made.test(model, datamodule=Data(), verbose=False)
    return found, states, on_meta(model)


def test_parameters_are_where_they_are_used(tmp_path: Path, three_ranks: Ranks) -> None:
    last, inner, first = three_ranks.run(places, tmp_path, Ends, 3)

    assert last == (set(), LAST | FIRST | TAIL, set())
    assert first == (LAST, FIRST | TAIL, set())
    assert inner == (LAST | FIRST, TAIL, set())


def test_parameters_of_a_module_with_a_loop_are_where_they_are_used(
    tmp_path: Path, three_ranks: Ranks
) -> None:
    last, inner, first = three_ranks.run(places, tmp_path, Looped, 3)

    assert last == (set(), LAST | FIRST | TAIL, set())
    assert first == (LAST, FIRST | TAIL, set())
    assert inner == (LAST | FIRST, TAIL, set())


@pytest.mark.parametrize(
    "schedule, kind, options",
    [
        ("fill_drain", Ends, {"accumulate_grad_batches": 2}),
        ("1f1b", Ends, {"gradient_clip_val": 0.05}),
        ("fill_drain", Looped, {}),
        ("fill_drain", Keeping, {"accumulate_grad_batches": 2}),
    ],
)
def test_fit(
    tmp_path: Path, four_ranks: Pool, schedule: Any, kind: type[Ends], options: dict[str, Any]
) -> None:
    check_fit(tmp_path, four_ranks, "per_stage", schedule, kind, options, (4, 1))


@pytest.mark.parametrize(
    "schedule, kind", [("zero_bubble", Ends), (FOLDED, Ends), (FOLDED, Looped)]
)
def test_fit_over_two_processes(
    tmp_path: Path, two_ranks: Pool, schedule: Any, kind: type[Ends]
) -> None:
    """If the stages are folded, one process has the first and the last."""
    check_fit(tmp_path, two_ranks, "per_stage", schedule, kind, {}, (2, 1))


# Replicas, and fits that go on.


def replicas(
    root: Path, machines: Any, schedule: str, kind: type[Ends], resumed: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind()
    strategy = {"chunks": 2, "replicas": 2, "schedule": schedule, "outputs": "last"}
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    made = trainer_over(root, "per_stage", [2, 4], strategy, machines, **options)
    made.fit(model, datamodule=Halves(2))
    made.save_checkpoint(root / "end.ckpt")
    if resumed:
        options["max_epochs"] = 4
        made = trainer_over(root, "per_stage", [2, 4], strategy, machines, **options)
        model = kind()
        made.fit(model, datamodule=Halves(2), ckpt_path=root / "end.ckpt")
        made.save_checkpoint(root / "end.ckpt")
    states = {x for one in made.optimizers for x in one.state}
    assert not any(x.is_meta for x in states if isinstance(x, Tensor))
    return {name: x.detach() for name, x in model.state_dict().items() if not x.is_meta}


@pytest.mark.parametrize("schedule, resumed", [("fill_drain", False), ("1f1b", True)])
def test_replicas(tmp_path: Path, four_ranks: Pool, schedule: str, resumed: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Ends()
        epochs = 4 if resumed else 2
        made = trainer(tmp_path, max_epochs=epochs, limit_val_batches=0)
        made.fit(plain, datamodule=Halves(1))
        made.save_checkpoint(tmp_path / "plain.ckpt")
        state = plain.state_dict()

    found = four_ranks.run(replicas, tmp_path, (4, 1), schedule, Ends, resumed)

    for own in found:
        assert_close(own, {name: state[name] for name in own})
    assert set().union(*found) == state.keys()
    ours, theirs = (checkpoint(tmp_path / f"{name}.ckpt") for name in ("end", "plain"))
    for part in ("state_dict", "optimizer_states"):
        assert_close(ours[part], theirs[part])
