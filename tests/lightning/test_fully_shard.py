"""Models that ``configure_model`` divides by ``fully_shard`` train as a plain Trainer.

They do so as with ``sharding="parameters"`` alone, whose tests are in `test_sharded_parameters.py`.
Here are also the tests of ``fully_sharded``.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.pretrained import load_pretrained
from tests.lightning.test_processes import checkpoint
from tests.lightning.test_replicas import PLACES, Halves, Logging, fitted_plainly, result
from tests.support.lightning_modules import trainer
from tests.support.processes import said
from tests.support.ranks import Pool
from tests.support.trainers import RankEnvironment, trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

ARRANGEMENTS: dict[str, Any] = {
    **PLACES,
    "2x2 folded": ("per_stage", [1, 2, 2, 1], (4, 1)),
    "2x1 looped": ("single", [1] * 6, (4, 1)),
    "2x2 looped": ("per_stage", [1] * 6, (4, 1)),
}


class Sharded(Logging):
    """Shards layers, perhaps in groups, and perhaps itself, whenever a Trainer configures it."""

    def __init__(self, root: bool = True, *, grouped: bool = False) -> None:
        super().__init__("adam")
        self.root, self.grouped = root, grouped
        self.norms: list[float] = []
        self.shards = 0  # of parameters, so far

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        if self.grouped:
            fully_shard([self.layers[0], self.layers[2]], mesh=mesh)
        else:
            for layer in self.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        if self.root:
            fully_shard(self, mesh=mesh)
        self.shards += sum(isinstance(x, DTensor) for x in self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, GPipeStrategy):
            self.norms.append(strategy.grad_norm(self)["grad_2.0_norm_total"])
        else:
            gradients = [x.grad for x in self.parameters() if x.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


class OnMeta(Sharded):
    """Has layers without values until the stages have devices."""

    def __init__(self) -> None:
        super().__init__(root=False)
        self.layers = self.layers.to("meta")


def made_over(root: Path, place: str, strategy: dict[str, Any], **options: Any) -> Any:
    processes, balance, machines = ARRANGEMENTS[place]
    given = {"replicas": 2, "sharding": "parameters", "chunks": 4, "verify": False, **strategy}
    return trainer_over(root, processes, balance, given, machines, **{"max_epochs": 2, **options})


def fit(
    root: Path, place: str, build: Any, strategy: dict[str, Any], resume: Any, **options: Any
) -> dict[str, Any]:
    """What came of a fit of two replicas."""
    torch.manual_seed(0)
    model = build()
    made = made_over(root, place, strategy, **options)
    made.fit(model, datamodule=Halves(2), ckpt_path=resume)
    made.save_checkpoint(root / "end.ckpt")
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    return {**result(model, made), "norms": model.norms, "shards": model.shards}


def plainly(root: Path, build: Any, **options: Any) -> dict[str, Any]:
    model, made = fitted_plainly(root, build, **options)
    assert isinstance(model, Sharded)
    return {**result(model, made), "norms": model.norms}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Each replica has its share of the same parameters; losses and norms are the same in all."""
    together: dict[str, Tensor] = {}
    for each in found:
        own = each["parameters"]
        assert each["shards"] > 0 and own.keys() < expected["parameters"].keys()
        close(own, {name: expected["parameters"][name] for name in own})
        for name in ("losses", "norms", "logged"):
            close(each[name], expected[name])
        together |= own
    assert together.keys() == expected["parameters"].keys()


SCHEDULES = [
    ("2x1", "fill_drain", {}),
    ("2x2", "fill_drain", {"activation_checkpointing": "always"}),
    ("2x2", "1f1b", {}),
    ("2x2", "1f1b", {"activation_checkpointing": "always"}),
    ("2x2", "zero_bubble", {}),
    ("2x2 folded", "zero_bubble_v", {}),
    ("2x2 folded", "v_half", {}),
    ("2x1 looped", "fill_drain", {}),
    ("2x2 looped", "1f1b", {}),
]


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}],
    ids=["accumulated", "clipped"],
)
@pytest.mark.parametrize("place, schedule, strategy", SCHEDULES)
def test_fit(
    tmp_path: Path,
    two_ranks: Pool,
    four_ranks: Pool,
    place: str,
    schedule: str,
    strategy: dict[str, Any],
    options: dict[str, Any],
) -> None:
    pool = two_ranks if place.startswith("2x1") else four_ranks
    expected = plainly(tmp_path / "plain", Sharded, **options)

    strategy = {"schedule": schedule, **strategy}
    found = pool.run(partial(fit, **options), tmp_path / "both", place, Sharded, strategy, None)

    assert_same(found, expected)
    one, other = (checkpoint(tmp_path / run / "end.ckpt") for run in ("both", "plain"))
    for part in ("state_dict", "optimizer_states"):
        close(one[part], other[part])


class ByLightning(Sharded):
    """Is trained by Lightning's own strategy, whose gradients are shards."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert any(isinstance(module, FSDPModule) for module in self.modules())


def losses_by_lightning(root: Path) -> list[float]:
    torch.manual_seed(0)
    model, environment = ByLightning(), RankEnvironment(2)
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    made = trainer(root, strategy, devices=2, plugins=[environment], max_epochs=2)
    made.fit(model, datamodule=Halves(2))
    return model.losses


def test_losses_are_those_of_model_parallel_strategy(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool
) -> None:
    """The same LightningModule, first with FSDP2 on two devices, then on four by a pipeline."""
    by_lightning = two_ranks.run(losses_by_lightning, tmp_path)
    piped = four_ranks.run(fit, tmp_path, "2x2", Sharded, {"schedule": "1f1b"}, None)

    assert len(by_lightning[0]) > 2
    close([each["losses"] for each in piped], [by_lightning[0]] * 4)


@pytest.mark.parametrize("options", [{"grouped": True}, {"root": False}])
def test_layers_of_a_group_and_without_the_root(
    tmp_path: Path, two_ranks: Pool, options: dict[str, Any]
) -> None:
    build = partial(Sharded, **options)
    expected = plainly(tmp_path / "plain", build)

    assert_same(two_ranks.run(fit, tmp_path, "2x1", build, {}, None), expected)


@pytest.mark.parametrize("in_parts", [False, True])
def test_resuming_in_another_arrangement(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, in_parts: bool
) -> None:
    expected = plainly(tmp_path / "plain", Sharded, max_epochs=3)
    plainly(tmp_path / "first", Sharded, max_epochs=1)

    first, second = tmp_path / "first" / "end.ckpt", tmp_path / "second"
    strategy = {"save_distributed_checkpoint": in_parts}
    four_ranks.run(partial(fit, max_epochs=2), second, "2x2", Sharded, strategy, first)
    third = partial(fit, max_epochs=3)
    found = two_ranks.run(third, tmp_path, "2x1 looped", Sharded, {}, second / "end.ckpt")

    for each in found:
        close(each["parameters"], {n: expected["parameters"][n] for n in each["parameters"]})
    assert found[0]["step"] == expected["step"]


def fit_on_meta(root: Path, build: Any) -> dict[str, Any]:
    return fit(root, "2x2", build, {}, None)


def test_layers_on_the_meta_device(tmp_path: Path, four_ranks: Pool) -> None:
    """They are initialised as without ``fully_shard``."""
    found, expected = (four_ranks.run(fit_on_meta, tmp_path, x) for x in (OnMeta, Unsharded))

    for one, other in zip(found, expected, strict=True):
        close(one["parameters"], other["parameters"])
        close(one["losses"], other["losses"])


class Unsharded(OnMeta):
    def configure_model(self) -> None:
        pass


class Pretrained(Sharded):
    """Reads its layers from a file, before or after they are divided."""

    def __init__(self, file: Path, *, before: bool = False) -> None:
        super().__init__()
        self.file, self.before = file, before
        self.layers = self.layers.to("meta")

    def configure_model(self) -> None:
        if self.before:
            load_pretrained(self.layers, self.file)
        super().configure_model()
        if not self.before:
            load_pretrained(self.layers, self.file)


def pretrained(root: Path, file: Path, before: bool) -> Any:
    build = partial(Pretrained, file, before=before)
    return said(lambda: fit(root, "2x2", build, {}, None)) if before else fit_first(root, build)


def fit_first(root: Path, build: Any) -> dict[str, Tensor]:
    """The parameters of the pipeline when the fit starts."""
    model = build()
    made = made_over(root, "2x2", {}, max_steps=1)
    found: dict[str, Tensor] = {}

    class Recorded(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            named = pl_module.layers.named_parameters()
            found.update({n: x.detach().clone() for n, x in named if not x.is_meta})

    made.callbacks.append(Recorded())
    made.fit(model, datamodule=Halves(2))
    return found


def test_weights_of_files(tmp_path: Path, four_ranks: Pool) -> None:
    values = {n: torch.rand_like(x) for n, x in Sharded().layers.named_parameters()}
    save_file(values, file := tmp_path / "model.safetensors")

    together: dict[str, Tensor] = {}
    for found in four_ranks.run(pretrained, tmp_path, file, False):
        assert found.keys() < values.keys() and not found.keys() & together.keys()
        together |= found
    close(together, values)
    for error in four_ranks.run(pretrained, tmp_path, file, True):
        assert "Call fully_shard() before load_pretrained()." in error


def fit_and_test(root: Path) -> list[dict[str, float]]:
    """One Trainer after another, each of which configures the model."""
    torch.manual_seed(0)
    model, found = Sharded(), []
    for run in ("fit", "validate", "fit"):
        made = made_over(root, "2x2", {}, max_epochs=1)
        getattr(made, run)(model, datamodule=Halves(2))
        found.append({name: float(x) for name, x in made.callback_metrics.items()})
    assert model.shards == 3 * len(list(model.parameters()))
    deepcopy(model)  # FSDP2's own modules refuse it
    return found


def test_one_trainer_after_another(tmp_path: Path, four_ranks: Pool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, expected = Sharded(), []
        for run in ("fit", "validate", "fit"):
            made = trainer(tmp_path, max_epochs=1)
            getattr(made, run)(model, datamodule=Halves(1))
            expected.append({name: float(x) for name, x in made.callback_metrics.items()})

    for found in four_ranks.run(fit_and_test, tmp_path):
        close(found, expected)


def fit_one_replica(root: Path) -> dict[str, Any]:
    """The data-parallel dimension has one process in each stage, so nothing is divided."""
    torch.manual_seed(0)
    model = Sharded()
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=2)
    made.fit(model, datamodule=Halves(1))
    return {**result(model, made), "norms": model.norms, "shards": model.shards}


def test_one_replica(tmp_path: Path, two_ranks: Pool) -> None:
    expected = plainly(tmp_path / "plain", Sharded)

    assert_same(two_ranks.run(fit_one_replica, tmp_path), expected)


# What is refused.


class Refused(Sharded):
    """Shards a layer with other options."""

    def __init__(self, option: str) -> None:
        super().__init__()
        self.option = option

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh: DeviceMesh = self.device_mesh["data_parallel"]
        layer: Any = self.layers[0]
        every: dict[str, dict[str, Any]] = {
            "mp_policy": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            "offload_policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "mesh": {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("other",))},
        }
        fully_shard(layer, **{"mesh": mesh, **every.get(self.option, {})})
        if self.option == "factor":
            layer.set_gradient_divide_factor(1.0)
        if self.option == "hook":
            layer.weight.register_hook(lambda gradient: 2 * gradient)
        if self.option == "forward":
            layer(torch.zeros(1, 6, dtype=torch.float64))


def refused(root: Path, option: str, sharding: Any) -> str:
    made = made_over(root, "2x1", {"sharding": sharding}, max_steps=1)
    return said(lambda: made.fit(Refused(option), datamodule=Halves(2)))


@pytest.mark.parametrize(
    "option, found",
    [
        ("mp_policy", "got mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16"),
        ("offload_policy", "got an offload_policy of layers.0"),
        ("mesh", "got mesh=DeviceMesh("),
        ("factor", "got a factor for gradients of layers.0"),
        ("hook", "got hooks on gradients of layers.0"),
        ("forward", "got a forward by itself of layers.0"),
    ],
)
def test_other_options_are_refused(
    tmp_path: Path, two_ranks: Pool, option: str, found: str
) -> None:
    for error in two_ranks.run(refused, tmp_path, option, "parameters"):
        assert error.startswith("ValueError | fully_shard in configure_model may divide new layers")
        assert found in error


@pytest.mark.parametrize("sharding", [None, "gradients"])
def test_strategy_must_divide_parameters(
    tmp_path: Path, two_ranks: Pool, sharding: str | None
) -> None:
    for error in two_ranks.run(refused, tmp_path, "", sharding):
        assert error == (
            "ValueError | fully_shard in configure_model divides parameters among replicas, which "
            "a pipeline does by its schedule: got a strategy without. Write "
            "GPipeStrategy(sharding='parameters')."
        )
