"""Stages of several processes, which divide their layers, train as one process does.

Here are also the tests of ``dtensors`` and ``stage_shards``.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from signal import SIGKILL
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.data import whole_of
from tests.support.lightning_modules import trainer
from tests.support.processes import said
from tests.support.ranks import Failed, Pool, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH, HEADS, TOKENS, LENGTH = 4, 2, 7, 4


class Block(nn.Module):
    """A transformer block whose heads may be divided."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A bias has no gradient but rounding errors, which Adam would make steps of.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        projected = (layer(normed) for layer in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in projected)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


COLUMNS, ROWS, NORMS = ["query", "key", "value", "up"], ["out", "down"], ["norm", "second_norm"]


def divide(model: Model, mesh: DeviceMesh, *, by_sequence: bool) -> None:
    """Divide the heads and the inner features of blocks, and perhaps all else, by tokens."""
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    if by_sequence:
        tokens = Shard(1)
        plan = {name: ColwiseParallel(input_layouts=tokens) for name in COLUMNS}
        plan |= {name: RowwiseParallel(output_layouts=tokens) for name in ROWS}
        plan |= {name: SequenceParallel() for name in NORMS}
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        parallelize_module(model.embedding, mesh, embedding)
        head = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
        parallelize_module(model.head, mesh, head)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


class Model(L.LightningModule):
    """An embedding, blocks to pipeline, and a head; blocks are divided if there is a mesh."""

    def __init__(
        self,
        optimizer: str = "momentum",
        blocks: int = 2,
        drop: float = 0.0,
        *,
        by_sequence: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer, self.by_sequence = optimizer, by_sequence
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block(drop) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()
        self.seen: list[float] = []
        self.divided = False

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.divided:
            mesh = self.device_mesh["tensor_parallel"]
            divide(self, mesh, by_sequence=self.by_sequence)
            self.divided = True

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(self.embedding(x)))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Tied(Model):
    """The embedding, divided, is the weight of the head, in the pipeline's first and last stage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False).double()
        self.blocks = nn.Sequential(self.embedding, *self.blocks, self.head)
        self.head.weight = self.embedding.weight

    def configure_model(self) -> None:
        if self.device_mesh is None or self.divided:
            return
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
        parallelize_module(self.head, mesh, ColwiseParallel(output_layouts=Replicate()))
        self.head.weight = self.embedding.weight
        self.divided = True

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks(x)
        return output


class Fork(nn.Module):
    """Returns what its divided layers return, for which nothing has waited yet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.side = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(x)
        return self.down(y), self.side(y)


class Join(nn.Module):
    """Begins with divided layers, whose gradients come like that."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return Tensor(self.out(self.left(x[0]) * self.right(x[1]).tanh()))


class Forked(Model):
    """Two stages, between which two tensors go that divided layers compute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks = nn.Sequential(Fork(), Join()).double()

    def configure_model(self) -> None:
        if self.device_mesh is None or self.divided:
            return
        columns, rows = ColwiseParallel, RowwiseParallel
        plan: Any = {f"0.{name}": rows() for name in ("down", "side")}
        plan |= {name: columns() for name in ("0.up", "1.left", "1.right")} | {"1.out": rows()}
        parallelize_module(self.blocks, self.device_mesh["tensor_parallel"], plan)
        self.divided = True


KINDS: dict[str, type[Model]] = {"tied": Tied, "forked": Forked}


class Uneven(Model):
    """Has blocks with five inner features."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.up, block.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.double()


class UnevenLayers(Uneven):
    """Divides them in each layer alone."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not self.divided:
            up, down = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel
            plan: Any = {"up": up, "down": down(input_layouts=Replicate())}
            for block in self.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            self.divided = True


class Texts(L.LightningDataModule):
    """Two batches of four rows, which replicas divide."""

    def train_dataloader(self, seed: int = 1) -> DataLoader[Any]:
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        replicas = getattr(strategy, "data_parallel_size", 1)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(TOKENS, (8, LENGTH + 1), generator=generator)
        if replicas > 1:
            tokens = tokens[strategy.data_parallel_rank :: replicas]
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4 // replicas)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader(2)


def over(root: Path, strategy: dict[str, Any], **options: Any) -> L.Trainer:
    """A Trainer of stages of two processes each."""
    shards = {"chunks": 2, "tensor_parallel": 2, "module": "blocks"}
    balance = {"balance": [1, 1], **strategy}.pop("balance")
    given = {name: x for name, x in strategy.items() if name != "balance"}
    machines = dist.get_world_size(), 1
    return trainer_over(root, "per_stage", balance, {**shards, **given}, machines, **options)


def fit(
    root: Path,
    strategy: dict[str, Any] | None,
    model: dict[str, Any],
    options: dict[str, Any],
    path: Any = None,
) -> dict[str, Any]:
    """A fit over four processes, or without a pipeline, and what came of it in this process."""
    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    torch.manual_seed(0)
    made = trainer(root, **options) if strategy is None else over(root, strategy, **options)
    kind = KINDS.get(model.get("kind", ""), Model)
    module = kind(**{name: x for name, x in model.items() if name != "kind"})
    made.fit(module, Texts(), ckpt_path=path)
    made.save_checkpoint(root / "end.ckpt")
    end = made.callback_metrics
    return {"seen": module.seen, "val_loss": float(end["val_loss"]), "random": torch.rand(())}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def same_checkpoints(*paths: Path) -> None:
    one, other = (torch.load(path / "end.ckpt", weights_only=False) for path in paths)
    for name in ("state_dict", "optimizer_states"):
        close(one[name], other[name])


def compare(root: Path, ranks: Any, *given: dict[str, Any]) -> None:
    """Compare a fit over processes with a plain one."""
    strategy, model, options = given
    with torch.random.fork_rng(devices=[]):
        expected = fit(root / "plain", None, model, options)

    found = ranks.run(fit, root / "four", strategy, model, options)

    for each in found:
        if strategy.get("replicas", 1) == 1:  # else the loss is that of a replica
            close(each["seen"], expected["seen"])
        close(each["val_loss"], expected["val_loss"])
        assert each["random"] == found[0]["random"]
    same_checkpoints(root / "four", root / "plain")


@pytest.mark.parametrize(
    "strategy, model, options",
    [
        ({}, {"by_sequence": True}, {"gradient_clip_val": 0.05}),
        ({"schedule": "1f1b"}, {"optimizer": "adam"}, {"accumulate_grad_batches": 2}),
        ({"schedule": "zero_bubble"}, {"by_sequence": True}, {}),
        (
            {"schedule": "zero_bubble_v", "balance": [1] * 4},
            {"blocks": 4},
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        (
            {"activation_checkpointing": "always", "split_backward": True},
            {"by_sequence": True},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        ),
        ({"schedule": "1f1b", "balance": [2, 2]}, {"kind": "tied"}, {"gradient_clip_val": 0.05}),
        ({"schedule": "1f1b"}, {"kind": "forked"}, {}),
        ({}, {"kind": "forked"}, {}),
    ],
    ids=[
        *("fill-drain", "1f1b", "zero bubble", "zero bubble, V", "recomputed, split", "tied"),
        *("forked, 1f1b", "forked"),
    ],
)
def test_fit(
    tmp_path: Path,
    four_ranks: Pool,
    strategy: dict[str, Any],
    model: dict[str, Any],
    options: dict[str, Any],
) -> None:
    compare(tmp_path, four_ranks, strategy, model, options)


def test_compiled_layers(tmp_path: Path, two_ranks: Pool) -> None:
    """One stage of two processes, each of which compiles its layers on its shards."""
    strategy = {"balance": [2], "compile": {"backend": "eager"}, "verify": False}
    options = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}

    compare(tmp_path, two_ranks, strategy, {}, options)


def test_replicas(tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    with new_ranks(8) as ranks:
        compare(tmp_path, ranks, {"replicas": 2, "schedule": "1f1b"}, {}, options)


def test_replicas_of_one_stage(tmp_path: Path, four_ranks: Pool) -> None:
    model = {"by_sequence": True, "optimizer": "adam"}
    compare(tmp_path, four_ranks, {"replicas": 2, "balance": [2]}, model, {})


def resumed(root: Path, plain: Path, adam: dict[str, Any]) -> None:
    """Fits that end halfway, of which each goes on from another's checkpoint."""
    half, parts = {"max_epochs": 1}, {"save_distributed_checkpoint": True}
    fit(root / "half", {}, adam, half)
    fit(root / "half parts", parts, adam, half)
    fit(root / "from plain", {}, adam, {}, plain)
    fit(root / "from parts", {}, adam, {}, root / "half parts" / "end.ckpt")


def test_checkpoints_are_those_of_one_process(tmp_path: Path, four_ranks: Pool) -> None:
    adam = {"optimizer": "adam", "by_sequence": True}
    with torch.random.fork_rng(devices=[]):
        fit(tmp_path / "plain half", None, adam, {"max_epochs": 1})
        fit(tmp_path / "plain", None, adam, {})

    four_ranks.run(resumed, tmp_path, tmp_path / "plain half" / "end.ckpt", adam)

    with torch.random.fork_rng(devices=[]):
        fit(tmp_path / "plain from four", None, adam, {}, tmp_path / "half" / "end.ckpt")
        pipeline = {"strategy": GPipeStrategy([1, 1], module="blocks"), "devices": 2}
        path = tmp_path / "half parts" / "end.ckpt"
        fit(tmp_path / "one from parts", None, adam, pipeline, path)
    for name in ("from plain", "from parts", "plain from four", "one from parts"):
        same_checkpoints(tmp_path / name, tmp_path / "plain")


def fit_and_test(root: Path, strategy: dict[str, Any] | None) -> list[float]:
    """What the Trainers of one model found, one after another."""
    torch.manual_seed(0)
    module, found = Model(), []
    for run in ("fit", "validate", "fit"):
        options: dict[str, Any] = {"max_epochs": 1, "use_distributed_sampler": False}
        made = trainer(root, **options) if strategy is None else over(root, strategy, **options)
        getattr(made, run)(module, datamodule=Texts())
        found.append(float(made.callback_metrics["val_loss"]))
    return found


def test_one_trainer_after_another(tmp_path: Path, four_ranks: Pool) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = fit_and_test(tmp_path, None)

    for found in four_ranks.run(fit_and_test, tmp_path, {}):
        close(found, expected)


def unseeded(root: Path, by_sequence: bool) -> dict[str, Any]:
    """The parameters of a model with dropout that begins otherwise in each process."""
    torch.manual_seed(dist.get_rank())
    made = over(root, {"verify": not by_sequence}, max_epochs=1)
    module = Model(drop=0.2, by_sequence=by_sequence)
    for block in module.blocks:
        nn.init.normal_(
            block.get_parameter("norm.weight")
        )  # SequenceParallel takes them to be the same
    made.fit(module, Texts())
    made.save_checkpoint(root / "end.ckpt")
    parameters = module.named_parameters()
    whole = {name: whole_of(p) for name, p in parameters if not p.is_meta}
    return {"whole": whole, "random": torch.rand(()), "seen": module.seen}


@pytest.mark.parametrize("by_sequence", [False, True])
def test_processes_of_a_stage_begin_and_draw_alike(
    tmp_path: Path, four_ranks: Pool, by_sequence: bool
) -> None:
    found = four_ranks.run(unseeded, tmp_path, by_sequence)

    for one, other in (found[:2], found[2:]):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert found[0]["seen"] == found[2]["seen"]
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], x) for each in found for name, x in each["whole"].items())


class Undivided(Model):
    """A stage whose output is a DTensor."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        whole = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(self.blocks[0], self.device_mesh["tensor_parallel"], whole)


def send(root: Path) -> str:
    return said(lambda: over(root, {}, max_epochs=1).fit(Undivided(), Texts()))


def test_stage_that_returns_no_tensor_of_its_own_is_refused(tmp_path: Path) -> None:
    with new_ranks(4) as ranks:
        errors = ranks.run(send, tmp_path)

    what = (
        r"between stages go the tensors of each process, got a DTensor of shape \(2, 4, 4\): give"
    )
    assert all(re.search(what, error) for error in errors)


# What would go wrong without an error, or end with another one.


class Manual(Model):
    """Computes gradients without the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._loss(batch).backward()


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, sparse=True).double()


class Scaled(nn.Module):
    """Scales shards of activations by a parameter that is no shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.up(x).unflatten(-1, (-1, WIDTH)) * self.scale
        return x + self.down(inner.flatten(-2))


class OwnScales(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Scaled(), Scaled()).double()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


class BadLayer(Model):
    """A layer raises when graphs have the shards of others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[-1].register_forward_hook(self._raise)
        return super().training_step(batch, batch_idx)

    def _raise(self, *_: Any) -> None:
        raise KeyError("a layer")


def ended(root: Path, build: type[Model]) -> str:
    made = over(root, {"replicas": 2, "balance": [2]}, max_epochs=1, use_distributed_sampler=False)
    torch.manual_seed(
        0
    )  # gradients of other weights may happen to differ by less than is warned of
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a parameter that parallelize_module")
        return said(lambda: made.fit(build(), Texts()))


@pytest.mark.parametrize(
    "build, message",
    [
        (Manual, "write self.manual_backward(loss), not loss.backward()"),
        (Sparse, "must be dense: got embedding with sparse=True"),
        (OwnScales, "got different ones for blocks.0.scale, blocks.1.scale"),
        (BadLayer, "KeyError | 'a layer'"),
    ],
)
def test_error(tmp_path: Path, build: type[Model], message: str) -> None:
    with new_ranks(4) as ranks:
        errors = [str(error) for error in ranks.outcomes(ended, tmp_path, build)]

    assert any(message in error for error in errors), errors


class Failing(Model):
    """One process of a stage ends in the second step, in a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx and self.trainer.global_rank == 3:
            self.blocks[1].register_forward_hook(lambda *_: os.kill(os.getpid(), SIGKILL))
        return super().training_step(batch, batch_idx)


def fail(root: Path) -> str:
    return said(lambda: over(root, {}, max_epochs=1).fit(Failing(), Texts()))


def test_lost_process_of_a_stage_ends_all(tmp_path: Path) -> None:
    with new_ranks(4) as ranks:
        *others, lost = ranks.outcomes(fail, tmp_path)

    assert isinstance(lost, Failed)
    for each in others:
        assert each.startswith("RankFailed | ") and "rank 3" in each


def fit_uneven(root: Path, build: Any) -> tuple[list[float], list[str]]:
    """The losses, and the error with its notes."""
    made, notes = over(root, {}, max_epochs=1), []
    torch.manual_seed(0)
    model = build()
    try:
        made.fit(model, Texts())
    except RuntimeError as error:
        notes = [f"{error}", *getattr(error, "__notes__", [])]
    return model.seen, notes


def test_features_that_do_not_divide(tmp_path: Path) -> None:
    """A layer alone pads its shards; between layers nobody knows that there is one fewer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UnevenLayers()
        trainer(tmp_path, max_epochs=1).fit(model, Texts())

    with new_ranks(4) as ranks:
        for seen, notes in ranks.run(fit_uneven, tmp_path, UnevenLayers):
            assert not notes
            close(seen, model.seen)
        for _, notes in ranks.run(fit_uneven, tmp_path, Uneven)[:2]:
            assert any("got blocks.0.up.weight, blocks.0.up.bias, blocks.0." in x for x in notes)


class RaisesOnce(Model):
    """A layer raises in the second step of the first fit, in one process."""

    raises = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx and self.raises and self.trainer.global_rank == 3:
            self.handle = self.blocks[1].register_forward_hook(self._raise)
        return super().training_step(batch, batch_idx)

    def _raise(self, *_: Any) -> None:
        self.handle.remove()
        raise KeyError("a layer")


def fit_again(root: Path | None, same: bool) -> tuple[str, list[float]]:
    """How a fit fails in one process, and the losses of the next one, with its model or another.

    Without a pipeline: the losses after one step.
    """
    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    torch.manual_seed(0)
    model, message = RaisesOnce(), ""
    if root is None:
        trainer(Path(), limit_train_batches=1, **options).fit(model, Texts())
    else:
        message = said(lambda: over(root, {}, **options).fit(model, Texts()))
    if not same:
        torch.manual_seed(0)
        model = RaisesOnce()
    model.raises, model.seen = False, []
    made = trainer(Path(), **options) if root is None else over(root, {}, **options)
    made.fit(model, Texts())
    return message, model.seen


def test_fit_after_one_that_failed(tmp_path: Path) -> None:
    """The stages' groups are made again, and what keeps the names of the first ones finds them."""
    with torch.random.fork_rng(devices=[]):
        expected = {same: fit_again(None, same)[1] for same in (True, False)}

    with new_ranks(4) as ranks:
        for same in (True, False, True):
            for message, seen in ranks.run(fit_again, tmp_path, same):
                assert "KeyError" in message
                close(seen, expected[same])
