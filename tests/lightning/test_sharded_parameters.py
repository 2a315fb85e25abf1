"""Replicas that divide the parameters of stages train as those with whole ones.

Drawn fits, resumed ones and bytes are in `test_sharded_gradients.py` and
`test_sharded_optimizers.py`. Here are also the tests of ``replica_weights``, ``divided_weights``,
``gathered_weights`` and ``visiting_weights``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import lightning.pytorch.callbacks as library
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.faithful import Shadows
from lightning_gpipe.core.run.host.visiting_weights import VisitingWeights
from lightning_gpipe.distributed.replica_weights import ReplicaWeights
from tests.lightning.test_averages_over_processes import Recurrent
from tests.lightning.test_replicas import Blocks, Halves, Logging, result
from tests.support.lightning_modules import Classifier, rows
from tests.support.processes import said
from tests.support.ranks import Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


class Uneven(Halves):
    """Other numbers of rows in each replica, so other numbers of micro-batches."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        size = [4, 1][strategy.data_parallel_rank]
        sampler = list(range(20)) if size == 4 else list(range(5))
        return DataLoader(rows(20, seed=1), batch_size=size, sampler=sampler)


class Twice(Classifier):
    """Calls the pipeline twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x) + self(2 * x), y)


class Skipping(Classifier):
    """Does not call the pipeline in the second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx != 1:
            return super().training_step(batch, batch_idx)
        return self.head(batch[0][:, :1].double().expand(-1, 8)).square().mean()


class Frozen(Classifier):
    """Trains the last layer and the head only."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.layers[:4].requires_grad_(False)


class Normalised(Classifier):
    def __init__(self) -> None:
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()]
        super().__init__(
            "adam", layers=nn.Sequential(*layers, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        )


class Recurring(Classifier):
    """Has layers that keep lists of their weights."""

    def __init__(self) -> None:
        layers = [nn.Linear(6, 8), Recurrent(), nn.Tanh(), nn.Linear(8, 8), Recurrent(), nn.Tanh()]
        super().__init__("adam", layers=nn.Sequential(*layers))


class Following(Classifier):
    """The parameters of its second stage are all those of its first."""

    def __init__(self) -> None:
        middle, last = nn.Linear(8, 8), nn.Linear(8, 8)
        last.weight, last.bias = middle.weight, middle.bias
        layers = nn.Linear(6, 8), middle, last, nn.Tanh(), nn.Identity(), nn.Tanh()
        super().__init__("adam", layers=nn.Sequential(*layers))


class Penalised(Logging):
    """Has a hook on a gradient, so that each replica keeps this parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.get_parameter("layers.2.weight").register_hook(lambda gradient: 2 * gradient)


class Cutting(Callback):
    """Cuts the pipeline anew after the first epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, GPipeStrategy)
        if trainer.current_epoch == 0:
            strategy.rebalance([4, 2])


PLACES: dict[str, Any] = {
    "2x1": ("single", [2, 4], (4, 1)),
    "2x2": ("per_stage", [2, 4], (4, 1)),
    "2x2 looped": ("per_stage", [1] * 6, (4, 1)),
}


def fit(
    root: Path,
    place: str,
    build: Callable[[], Any],
    sharding: str | None,
    data: type[Halves] = Halves,
    strategy: dict[str, Any] | None = None,
    callbacks: list[Callback] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What came of a fit of two replicas."""
    processes, balance, machines = PLACES[place]
    options = {
        "replicas": 2,
        "sharding": sharding,
        "chunks": 4,
        "verify": False,
        **(strategy or {}),
    }
    made = trainer_over(
        root, processes, balance, options, machines, max_epochs=2, callbacks=callbacks, **more
    )
    torch.manual_seed(0)
    model = build()
    made.fit(model, datamodule=data(2))
    buffers = {name: x for name, x in model.named_buffers() if not x.is_meta}
    return {**result(model, made), "buffers": buffers}


def assert_same_fit(root: Path, ranks: Any, *args: Any, **options: Any) -> None:
    """Fits with divided parameters end where those with divided gradients do."""
    place, build = args
    divided, whole = (
        ranks.run(partial(fit, **options), root, place, build, sharding)
        for sharding in ("parameters", "gradients")
    )
    half = len(whole) // 2
    for one, other, expected in zip(divided, divided[half:], whole, strict=False):
        together = {**one["parameters"], **other["parameters"]}
        torch.testing.assert_close(together, expected["parameters"], rtol=1e-12, atol=1e-12)
    assert divided[0]["parameters"].keys() < whole[0]["parameters"].keys()
    for one, expected in zip(divided, whole, strict=True):
        assert one["parameters"].keys() <= expected["parameters"].keys()
        torch.testing.assert_close(one["buffers"], expected["buffers"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one["logged"], expected["logged"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_stage_whose_parameters_are_those_of_another(
    four_ranks: Any, tmp_path: Path, schedule: str
) -> None:
    """Once its process refused their gradients, as of a backward by hand."""
    assert_same_fit(tmp_path, four_ranks, "2x2", Following, strategy={"schedule": schedule})


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_recurrent_layers_that_run_again(tmp_path: Path, four_ranks: Pool, schedule: str) -> None:
    """Once the placeholders of an earlier batch's weights, which are NaN, seemed to be edited."""
    strategy = {"schedule": schedule, "activation_checkpointing": "always"}
    options = {"num_sanity_val_steps": 1}
    assert_same_fit(tmp_path, four_ranks, "2x2", Recurring, strategy=strategy, **options)


def fit_averaged(
    root: Path,
    place: str,
    build: Callable[[], Any],
    sharding: str | None,
    strategy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    callbacks: list[Callback] = [library.EMAWeightAveraging(decay=0.5)]
    return fit(root, place, build, sharding, strategy=strategy, callbacks=callbacks)


@pytest.mark.parametrize("place", ["2x1", "2x2"])
@pytest.mark.parametrize("run", [fit, fit_averaged])
def test_statistics_of_replicas(
    four_ranks: Any, two_ranks: Any, tmp_path: Path, place: str, run: Any
) -> None:
    """Each replica evaluates with those of the first, as with DistributedDataParallel.

    Once replicas without its wrapper evaluated with their own, or with their own averages.
    """
    if run is fit_averaged and not hasattr(library, "WeightAveraging"):
        pytest.skip("new in Lightning 2.6")
    ranks = two_ranks if place == "2x1" else four_ranks
    wrapped = partial(run, strategy={"ddp": {"find_unused_parameters": True}})
    whole = ranks.run(wrapped, tmp_path, place, Normalised, None)
    divided = ranks.run(run, tmp_path, place, Normalised, "gradients")

    for one, expected in zip(divided, whole, strict=True):
        torch.testing.assert_close(one["buffers"], expected["buffers"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one["logged"], expected["logged"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "place, build",
    [
        ("2x1", Twice),
        ("2x2", Twice),
        ("2x1", Skipping),
        ("2x2", Frozen),
        ("2x1", Normalised),
        ("2x1", Penalised),
        ("2x1", Blocks),
        ("2x2", Blocks),
    ],
)
def test_model(tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, build: Any) -> None:
    assert_same_fit(tmp_path, two_ranks if place == "2x1" else four_ranks, place, build)


@pytest.mark.parametrize(
    "place, schedule", [("2x2", "fill_drain"), ("2x2", "1f1b"), ("2x2 looped", "fill_drain")]
)
def test_replicas_with_other_numbers_of_micro_batches(
    tmp_path: Path, four_ranks: Pool, place: str, schedule: str
) -> None:
    strategy = {"schedule": schedule}
    assert_same_fit(tmp_path, four_ranks, place, Classifier, data=Uneven, strategy=strategy)


def test_cut_by_another_balance(tmp_path: Path, two_ranks: Pool) -> None:
    assert_same_fit(tmp_path, two_ranks, "2x1", Logging, callbacks=[Cutting()])


def save_average(root: Path, sharding: str) -> list[Any]:
    averaging = library.EMAWeightAveraging(decay=0.5)
    strategy = {"replicas": 2, "sharding": sharding}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1), callbacks=[averaging])
    torch.manual_seed(0)
    model = Classifier()
    made.fit(model, datamodule=Halves(2))
    made.save_checkpoint(root / f"{sharding}.ckpt")
    return made.validate(model, datamodule=Halves(2), verbose=False)


@pytest.mark.skipif(not hasattr(library, "WeightAveraging"), reason="new in Lightning 2.6")
def test_checkpoint_of_an_average(tmp_path: Path, two_ranks: Pool) -> None:
    """Each replica averages its share, so the first one alone has no whole average."""
    saved, validated = [], []
    for sharding in ("gradients", "parameters"):
        validated.append(two_ranks.run(save_average, tmp_path, sharding))
        saved.append(torch.load(tmp_path / f"{sharding}.ckpt", weights_only=False))

    for key in ("state_dict", "current_model_state"):
        torch.testing.assert_close(saved[1][key], saved[0][key], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(validated[1], validated[0])  # once some weights had no memory


# One Trainer after another, with the same model.


def fit_and_test(root: Path, sharding: str) -> list[dict[str, float]]:
    found = []
    torch.manual_seed(0)
    model = Logging()
    for balance, run, each in (
        ([2, 4], "fit", sharding),
        ([3, 3], "validate", sharding),
        ([4, 2], "fit", sharding),
        ([1, 5], "fit", None),  # which gets whole parameters, too
        ([1, 5], "fit", sharding),
        ([1, 5], "fit", "gradients"),
    ):
        strategy = {"replicas": 2, "sharding": each}
        made = trainer_over(root, "single", balance, strategy, (4, 1), max_epochs=1)
        getattr(made, run)(model, datamodule=Halves(2))
        found.append({name: float(x) for name, x in made.callback_metrics.items()})
    return found


def test_one_trainer_after_another(tmp_path: Path, two_ranks: Pool) -> None:
    whole, divided = (
        two_ranks.run(fit_and_test, tmp_path, each) for each in ("gradients", "parameters")
    )

    torch.testing.assert_close(divided, whole, rtol=1e-12, atol=1e-12)


def predict_unevenly(root: Path) -> int:
    """The number of predictions, of five rows one by one: the Trainer repeats none of them."""
    model = Classifier()
    strategy = {"replicas": 2, "sharding": "parameters"}
    made = trainer_over(root, "single", [2, 4], strategy, (4, 1), max_epochs=1)
    made.fit(model, datamodule=Halves(2))
    return len(made.predict(model, DataLoader(rows(5, seed=1), batch_size=1)) or [])


def test_predictions_of_other_numbers_of_batches(tmp_path: Path, two_ranks: Pool) -> None:
    assert two_ranks.run(predict_unevenly, tmp_path) == [3, 2]


# What is on a device.


@contextmanager
def counted() -> Iterator[tuple[list[int], list[int]]]:
    """Yield the stages in the order of their gathers, and the numbers loaded at each."""
    gathered: list[int] = []
    loaded: list[int] = []
    now: set[int] = set()
    gather, drop = ReplicaWeights.gather, VisitingWeights.drop

    def noted(weights: ReplicaWeights, j: int, leaves: Any) -> Any:
        gathered.append(j)
        now.add(j)
        loaded.append(len(now))
        return gather(weights, j, leaves)

    def noted_drop(weights: VisitingWeights) -> None:
        now.discard(weights._stage.partition.index)
        drop(weights)
        assert all(part.copy.untyped_storage().nbytes() <= 8 for part in weights._parts)

    with (
        patch.object(ReplicaWeights, "gather", noted),
        patch.object(VisitingWeights, "drop", noted_drop),
    ):
        yield gathered, loaded


def fit_counted(root: Path, place: str) -> tuple[list[int], list[int], int]:
    with counted() as (gathered, loaded):
        found = fit(root, place, partial(Classifier, "adam"), "parameters")
    return gathered, loaded, found["step"]


def test_weights_are_gathered_once_for_a_mini_batch(tmp_path: Path, four_ranks: Pool) -> None:
    for rank, (gathered, _, steps) in enumerate(four_ranks.run(fit_counted, tmp_path, "2x2")):
        evaluations = 2 * 2 + 2  # batches of two epochs, and of the check before
        assert gathered == [rank % 2] * (steps + evaluations)


def test_two_stages_are_on_a_device_at_once(tmp_path: Path, four_ranks: Pool) -> None:
    for gathered, loaded, _ in four_ranks.run(fit_counted, tmp_path, "2x2 looped"):
        assert set(gathered) in ({0, 2, 4}, {1, 3, 5})
        assert max(loaded) == 2


def test_shadow_of_a_parameter_that_another_replica_keeps() -> None:
    layer = nn.Linear(2, 2, device="meta")
    slots = frozenset([(layer, "weight"), (layer, "bias")])

    shadows = Shadows([layer], grad=True, device=torch.device("cpu"), followed=slots, divided=True)

    assert [part.weight for part in shadows.hosted] == [layer.weight, layer.bias]
    for part in shadows.hosted:
        assert part.copy.shape == part.weight.shape and part.copy.requires_grad
        assert part.copy.untyped_storage().nbytes() == part.copy.element_size()


# What is refused.


class Manual(Classifier):
    """Computes gradients without the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        F.cross_entropy(self(batch[0]), batch[1]).backward()


class OwnPenalty(Classifier):
    """Uses the parameters of stages in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(parameter.square().sum() for parameter in self.parameters())


class LateHook(Classifier):
    def on_train_start(self) -> None:
        self.get_parameter("layers.2.weight").register_hook(lambda gradient: 2 * gradient)


class Averaging(Classifier):
    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(0.1)]


class TwoModules(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double()


def refused(root: Path, build: Any, strategy: dict[str, Any]) -> str:
    options = {"replicas": 2, "sharding": "parameters", **strategy}
    balance = [[2, 4]] * len(strategy["module"]) if "module" in strategy else [2, 4]
    made = trainer_over(root, "single", balance, options, (4, 1))
    try:
        made.fit(build(), datamodule=Halves(2))
    except BaseException as error:
        return " | ".join([str(error), *getattr(error, "__notes__", ())])
    return "none"


@pytest.mark.parametrize(
    "build, strategy, message",
    [
        (Manual, {}, "write self.manual_backward(loss), not loss.backward()"),
        (OwnPenalty, {}, "a process has the parameters that it uses"),
        (LateHook, {}, "a hook on the gradient of a parameter that replicas divide must be there"),
        (Averaging, {}, "a process has those of its share, with sharding='parameters'"),
        (TwoModules, {"module": ["layers", "others"]}, "for one pipeline"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, build: Any, strategy: dict[str, Any], message: str, two_ranks: Pool
) -> None:
    errors = two_ranks.run(refused, tmp_path, build, strategy)

    assert any(message in error for error in errors), errors


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"weights": "host"},
            "got weights='host'. Write weights='device', or sharding='gradients'",
        ),
        ({"weights": "auto"}, "got weights='auto'"),
        ({"verify": True}, "Verify in a run with sharding='gradients'"),
        ({"compile": True}, "which compiled layers do not expect: got compile=True"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPipeStrategy([2, 4], replicas=2, sharding="parameters", **arguments)


# A replica that is lost, or ends its epoch before the others.


class Dying(Classifier):
    """Its second replica is killed in the backward of a step, when the other gathers weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        strategy: Any = self.trainer.strategy
        if batch_idx == 1 and strategy.data_parallel_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


class Longer(Halves):
    """More batches in the first replica."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        return Stream([3, 2][strategy.data_parallel_rank])


class Stream(IterableDataset[Any]):
    """Batches whose number the Trainer does not know."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return iter(list(DataLoader(rows(12, seed=1), batch_size=4))[: self._number])


def ended(root: Path, build: Callable[[], Any], data: type[Halves]) -> str:
    strategy = {"replicas": 2, "sharding": "parameters", "lost_after": timedelta(seconds=3)}
    made = trainer_over(root, "single", [1] * 6, strategy, (4, 1), max_epochs=1)
    return said(lambda: made.fit(build(), datamodule=data(2)))


def test_replica_that_is_lost_in_a_step(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        error, _ = ranks.outcomes(ended, tmp_path, Dying, Halves)

    assert str(error).startswith("RankFailed | rank 1 ")


def test_replica_with_fewer_batches(tmp_path: Path) -> None:
    with new_ranks(2) as ranks:
        errors = [str(x) for x in ranks.outcomes(ended, tmp_path, Classifier, Longer)]

    assert any("the gradients of all replicas" in error for error in errors), errors


class OldName(nn.Module):
    """Keeps its parameter under another name in a state dict, as layers that were renamed do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}gain"] = destination.pop(f"{prefix}scale")


class Renaming(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for k in range(1, 6):
            self.layers[k] = nn.Sequential(self.layers[k], OldName())


def names_saved(root: Path) -> dict[str, bool]:
    """The names of the parameters in a checkpoint, and whether each has been trained."""
    made = trainer_over(
        root, "single", [2, 4], {"replicas": 2, "sharding": "parameters"}, (4, 1), max_epochs=1
    )
    made.fit(Renaming(), datamodule=Halves(2))
    made.save_checkpoint(root / "end.ckpt")
    state = torch.load(root / "end.ckpt", weights_only=False)["state_dict"]
    return {name: bool((value != 1).any()) for name, value in state.items()}


def test_names_that_modules_give_in_their_state(tmp_path: Path, two_ranks: Pool) -> None:
    """Once the values were looked for by the names of the parameters: none had them."""
    found = two_ranks.run(names_saved, tmp_path)[0]

    assert {f"layers.{k}.1.gain" for k in range(1, 6)} <= found.keys()
    assert all(found.values())


# A step that one replica alone runs in another way: others would wait for its weights.


class Alone(Classifier):
    """Runs its second training step in another way in the second replica."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        if batch_idx == 1 and strategy.data_parallel_rank == 1:
            return self.other_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def other_step(self, batch: Any, batch_idx: int) -> Any:
        """Return a loss without a call of the pipeline."""
        return self.head(batch[0][:, :1].double().expand(-1, 8)).square().mean()


class CallsTwice(Alone):
    def other_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) + self(2 * batch[0]), batch[1])


class Evaluates(Alone):
    """Leaves out its last evaluation in place of a training step."""

    def other_step(self, batch: Any, batch_idx: int) -> Any:
        return Classifier.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        if not batch_idx or strategy.data_parallel_rank == 0:
            super().validation_step(batch, batch_idx)


CALL = "rank 0 waits for the weights that other replicas keep (at "
APART = {
    Alone: (CALL, "rank 1 waits for the gradients of all replicas, in a step without a call of"),
    CallsTwice: (CALL.replace("0", "1"), "rank 0 waits for the gradients of all replicas (at "),
    Evaluates: (CALL, "rank 1 waits for "),
}


@pytest.mark.parametrize("kind", APART)
def test_step_of_one_replica_alone(tmp_path: Path, kind: type[Alone]) -> None:
    """Once the others waited for as long as the timeout, half an hour."""
    with new_ranks(2) as ranks:
        errors = [str(x) for x in ranks.outcomes(ended, tmp_path, kind, Halves)]

    for error in errors:
        assert error.startswith("OutOfStep | all processes must do the same in the same order")
        assert all(part in error for part in APART[kind]), error
