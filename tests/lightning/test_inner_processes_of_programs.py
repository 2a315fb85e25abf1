"""Loops over blocks and traced forwards, whose calls processes between are told of, too.

Their programs are made of the user's code. So ``inner_processes`` lets all processes run it where
it makes a new program, and where nothing else would do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lightning.test_last_outputs import Everything, check_fit
from tests.support.lightning_modules import Classifier, Data
from tests.support.processes import said
from tests.support.ranks import Pool, Ranks, new_ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    # Ours, of batch norms around the pipeline, which see micro-batches.
    pytest.mark.filterwarnings("ignore:training_step must leave nothing on the module"),
]


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        """Map (rows, features) to (rows, 8)."""
        return self.dropout(torch.tanh(self.linear(x) + scale * shift))


class Loop(nn.Module):
    """Gives each block a value with rows, and uses a parameter between two of them."""

    def __init__(self, wide: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6), *(Block(8) for _ in range(5))])
        self.between = nn.Parameter(torch.ones(1))
        self.wide = wide
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        shift = x.mean(-1, keepdim=True).repeat(1, self.wide)
        for k, block in enumerate(self.blocks):
            x = block(x, shift)
            if k == 2:
                x = x * self.between
        return x


class Traced(nn.Module):
    """Uses a value with rows and a constant in all stages, in code that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fourth, self.fifth, self.sixth = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        shift = x.mean(-1, keepdim=True)
        x = torch.tanh(self.second(torch.tanh(self.first(x) + shift)) + scale * shift)
        x = torch.tanh(self.fourth(torch.tanh(self.third(x) + shift)) + scale * shift)
        return torch.tanh(self.sixth(torch.tanh(self.fifth(x) + shift)) + scale * shift)


class Counting(Everything):
    """Counts its steps by their kinds."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers: Any = layers
        self.enter, self.leave = nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.1))
        # Of this process: others are not told of such an object.
        self.began = SimpleNamespace(train=0, val=0, test=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.train += 1
        return super().training_step(batch, batch_idx)

    def _evaluate(self, batch: Any, stage: str) -> None:
        vars(self.began)[stage] += 1
        super()._evaluate(batch, stage)


class Looping(Counting):
    def __init__(self) -> None:
        super().__init__(Loop())


class Tracing(Counting):
    def __init__(self) -> None:
        super().__init__(Traced())


class Wide(Counting):
    """Gives each block a value that is larger than the batch."""

    def __init__(self) -> None:
        super().__init__(Loop(8))


class Scaling(Tracing):
    """Calls the layers with another constant in each epoch."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.current_epoch
        output: Tensor = self.head(self.layers(self.enter(x.double()), scale))
        return self.leave(output)


class Popping(Looping):
    """Takes its batch apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch.pop(0), *batch], batch_idx)


@pytest.mark.parametrize(
    "mode, schedule, kind, options",
    [
        ("per_stage", "fill_drain", Looping, {"accumulate_grad_batches": 2}),
        ("per_stage", "1f1b", Looping, {"gradient_clip_val": 0.05}),
        ("per_node", "zero_bubble", Looping, {"num_sanity_val_steps": 0}),
        ("per_stage", "fill_drain", Tracing, {"num_sanity_val_steps": 0}),
        ("per_stage", "1f1b", Tracing, {}),
        ("per_stage", "1f1b", Scaling, {}),
        ("per_stage", "fill_drain", Wide, {}),
        ("per_stage", "1f1b", Wide, {}),
        ("per_stage", "fill_drain", Popping, {}),
    ],
)
def test_fit(
    tmp_path: Path,
    four_ranks: Pool,
    mode: str,
    schedule: Any,
    kind: type[Classifier],
    options: dict[str, Any],
) -> None:
    machines = {"per_stage": (4, 1), "per_node": (4, 4)}[mode]
    check_fit(tmp_path, four_ranks, mode, schedule, kind, options, machines)


def test_process_of_both_ends(tmp_path: Path, two_ranks: Pool) -> None:
    """Once the other one lacked what code before a call uses, in its first validation."""
    options = {"num_sanity_val_steps": 0}
    check_fit(tmp_path, two_ranks, "per_stage", "zero_bubble_v", Looping, options, (2, 1))


def counts(root: Path, kind: Callable[[], Counting], schedule: str, sanity: int) -> Any:
    """The numbers of steps of a fit and a test, and what is on meta here after the fit."""
    strategy = {"outputs": "last", "schedule": schedule, "chunks": 2, "verify": False}
    options = {"max_epochs": 2, "num_sanity_val_steps": sanity}
    made = trainer_over(root, "per_stage", [2, 2, 2], strategy, (3, 1), **options)
    model = kind()
    made.fit(model, datamodule=Data())
    stages = tuple(f"layers.{name}" for name in ("blocks", *dict(Traced().named_children())))
    around = {x: p for x, p in model.named_parameters() if not x.startswith(stages)}
    on_meta = {name for name, parameter in around.items() if parameter.is_meta}
    made.test(model, datamodule=Data(), verbose=False)
    return vars(model.began), on_meta


HEAD, BEFORE = {"head.weight", "head.bias"}, {"before.weight", "before.bias"}


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
@pytest.mark.parametrize("kind", [Looping, Tracing])
@pytest.mark.parametrize("sanity", [1, 0])
def test_other_processes_run_the_step_once_for_each_program(
    tmp_path: Path, three_ranks: Ranks, kind: Callable[[], Counting], schedule: str, sanity: int
) -> None:
    """Without validation before training, they lack parameters when its program is made."""
    last, inner, first = three_ranks.run(counts, tmp_path, kind, schedule, sanity)

    between = {"layers.between"} if kind is Looping else set()
    steps = 6 * (1 if schedule == "fill_drain" else 2)  # of batches, or of micro-batches
    assert last == ({"train": steps, "val": 4 + sanity, "test": 2}, set())
    assert first == (last[0], HEAD)
    assert inner == ({"train": 1, "val": 1, "test": 1}, HEAD | BEFORE | between)


def test_all_run_steps_whose_values_for_stages_are_larger_than_the_batch(
    tmp_path: Path, three_ranks: Ranks
) -> None:
    _, inner, first = three_ranks.run(counts, tmp_path, Wide, "fill_drain", 1)

    assert inner == first
    assert inner[1] == HEAD


def test_program_of_another_constant(tmp_path: Path, three_ranks: Ranks) -> None:
    _, inner, _ = three_ranks.run(counts, tmp_path, Scaling, "fill_drain", 1)

    assert inner[0] == {"train": 2, "val": 2, "test": 1}


class Editing(Looping):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


def edited(root: Path) -> str:
    strategy = {"outputs": "last", "chunks": 2, "verify": False}
    made = trainer_over(root, "per_stage", [2, 2, 2], strategy, (3, 1), max_epochs=1)
    return said(lambda: made.fit(Editing(), datamodule=Data()))


def test_batch_that_is_edited_before_others_have_it(tmp_path: Path) -> None:
    with new_ranks(3) as ranks:
        last, *_ = ranks.run(edited, tmp_path)

    assert "a step must not edit its batch in place before its call" in last


# What goes by earlier steps, which not all processes have run.


class Annealing(Tracing):
    """Goes by a count of its steps, which is a number on the module."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        return super().training_step(batch, batch_idx)

    def count(self) -> None:
        self.calls += 1

    def counted(self) -> int:
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.enter(x.double()), 1.0 + self.counted() // 2))
        return self.leave(output)


class AnnealingLater(Annealing):
    """Counts them after the call, which the process of the last stage alone does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = Tracing.training_step(self, batch, batch_idx)
        self.count()
        return outcome


class InList:
    """Counts its steps in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def count(self) -> None:
        self.steps.append(1)

    def counted(self) -> int:
        return len(self.steps)


class ListingLater(InList, AnnealingLater):
    pass


class InObject:
    """Counts its steps in an object of which other processes are not told."""

    def __init__(self) -> None:
        super().__init__()
        self.own = SimpleNamespace(steps=0)

    def count(self) -> None:
        self.own.steps += 1

    def counted(self) -> int:
        return int(self.own.steps)


class Hiding(InObject, Annealing):
    pass


class HidingLater(InObject, AnnealingLater):
    pass


class HidingPieces(Hiding):
    """Has the same calls for the first micro-batch of each step, and others for the second."""

    def counted(self) -> int:
        return 2 * (self.own.steps // 4) if self.own.steps % 2 == 0 else 0


class OnLayers(Looping):
    """Sets an attribute of all blocks from the third step on."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        for k, block in enumerate(self.layers.blocks):
            self.layers.blocks[k] = Scaled(block)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        if self.counted() > 2:
            for block in self.layers.blocks:
                vars(block)["scale"] = 1.0 + self.counted()
        return super().training_step(batch, batch_idx)

    def count(self) -> None:
        self.calls += 1

    def counted(self) -> int:
        return self.calls


class OnLayersLater(OnLayers):
    """Counts its steps after the call."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = super().training_step(batch, batch_idx)
        self.calls += 1
        return outcome

    def count(self) -> None:
        pass


class OnLayersListing(InList, OnLayers):
    pass


class OnLayersHiding(InObject, OnLayers):
    pass


class OnLayersHidingLater(OnLayersHiding):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outcome = super().training_step(batch, batch_idx)
        self.own.steps += 1
        return outcome

    def count(self) -> None:
        pass


class Scaled(nn.Module):
    """A block with an attribute."""

    scale = 1.0

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """As the block, times a number."""
        output: Tensor = self.block(x, shift)
        return output * self.scale


@pytest.mark.parametrize("kind", [Annealing, AnnealingLater, ListingLater, OnLayers, OnLayersLater])
def test_numbers_of_earlier_steps(tmp_path: Path, four_ranks: Pool, kind: type[Classifier]) -> None:
    """Once an error, or those of a step on layers, silently, other ones in each process."""
    check_fit(tmp_path, four_ranks, "per_stage", "fill_drain", kind, {}, (4, 1))


@pytest.mark.parametrize("kind", [AnnealingLater, OnLayersLater, OnLayersListing])
def test_numbers_of_earlier_steps_over_two_processes(
    tmp_path: Path, two_ranks: Pool, kind: type[Classifier]
) -> None:
    check_fit(tmp_path, two_ranks, "per_stage", "fill_drain", kind, {}, (2, 1))


def annealed(root: Path, kind: Callable[[], Counting], ranks: int, schedule: str) -> str:
    strategy = {"outputs": "last", "chunks": 2, "verify": False, "schedule": schedule}
    balance = [6 // ranks] * ranks
    made = trainer_over(root, "per_stage", balance, strategy, (ranks, 1), max_epochs=2)
    return said(lambda: made.fit(kind(), datamodule=Data()))


CALLS = "other calls of layers, or other numbers in these"
PIECES = "others, or other numbers in these, for micro-batch 1"
VALUES = "scale where it is"


@pytest.mark.parametrize(
    "kind, ranks, schedule, message",
    [
        (Hiding, 3, "fill_drain", CALLS),
        (HidingLater, 3, "fill_drain", CALLS),
        (HidingPieces, 3, "1f1b", PIECES),
        (OnLayersHiding, 3, "fill_drain", VALUES),
        (OnLayersHidingLater, 3, "fill_drain", VALUES),
        (OnLayersHidingLater, 2, "fill_drain", VALUES),
        (OnLayersHidingLater, 2, "1f1b", VALUES),
    ],
)
def test_what_goes_by_steps_that_other_processes_have_not_run(
    tmp_path: Path, kind: Callable[[], Counting], ranks: int, schedule: str, message: str
) -> None:
    """Once some stages had the numbers of one step, and some those of another."""
    with new_ranks(ranks) as processes:
        errors = processes.run(annealed, tmp_path, kind, ranks, schedule)

    assert any(message in error for error in errors), errors
    assert all("write outputs='all'" in error for error in errors), errors
