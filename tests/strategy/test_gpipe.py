"""Unchanged model: the arguments of GPipeStrategy, and what the Trainer sees of it."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy

import lightning_gpipe
from lightning_gpipe import GPipe, GPipeStrategy
from tests.support.lightning_modules import fitted, trainer
from tests.support.process import workers

# What a user can write.


def test_public_names() -> None:
    assert lightning_gpipe.__all__ == [
        "GPipe",
        "GPipeStrategy",
        "LayerProfile",
        "LossParity",
        "MicroBatching",
        "ModelProfile",
        "OutOfStep",
        "PaddedSequences",
        "Parity",
        "PipelineMonitor",
        "Place",
        "Plan",
        "RankFailed",
        "Rebalance",
        "Rows",
        "Schedule",
        "StepInBackward",
        "StepParity",
        "Timeline",
        "balance_by_memory",
        "balance_by_parameters",
        "balance_by_time",
        "collect_loss_terms",
        "is_recomputing",
        "loss_in_pieces",
        "loss_term",
        "plan",
        "profile",
        "verify",
        "verify_step",
        "whole",
    ]
    assert all(hasattr(lightning_gpipe, name) for name in lightning_gpipe.__all__)


@pytest.mark.parametrize(
    "kind, expected",
    [
        (
            GPipeStrategy,
            "(balance='parameters', chunks=None, *, module=None, schedule='fill_drain', "
            "activation_checkpointing=None, deferred_batch_norm=True, "
            "microbatching=None, compile=False, threads='auto', cores=None, split_backward=False, "
            "verify='sample', around='last', weights='device', offload_activations=False, "
            "processes='single', outputs='auto', timeout=datetime.timedelta(seconds=1800), "
            "lost_after=None, "
            "process_group_backend=None, start_method='popen', replicas=1, tensor_parallel=1, "
            "ddp=None, sharding=None, save_distributed_checkpoint=False)",
        ),
        (
            GPipe,
            "(model, /, balance, *, module=None, devices=None, chunks=1, "
            "activation_checkpointing='except_last', deferred_batch_norm=True, "
            "microbatching=None, threads='auto', cores=None, split_backward=False, around='last', "
            "chained=False, folded=False, weights='device', offload_activations=False, "
            "sample=None, optimizer=None, "
            "owners=None, group=None, lost_after=None)",
        ),
    ],
)
def test_signature(kind: Callable[..., Any], expected: str) -> None:
    signature = inspect.signature(kind)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]

    assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == expected


def test_every_argument_is_annotated_and_documented() -> None:
    # jsonargparse makes the command line of both.
    for name, parameter in inspect.signature(GPipeStrategy).parameters.items():
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"{name}: " in (GPipeStrategy.__doc__ or "")


def test_strategy_has_parts_and_no_ancestors_of_ours() -> None:
    assert GPipeStrategy.__bases__ == (ParallelStrategy,)


# What it is to the Trainer: one process with several devices.


def test_one_process_whatever_the_number_of_devices(tmp_path: Path) -> None:
    strategy = trainer(tmp_path, GPipeStrategy(), devices=3).strategy

    assert isinstance(strategy, GPipeStrategy) and isinstance(strategy, ParallelStrategy)
    assert strategy.world_size == 1
    assert strategy.global_rank == strategy.local_rank == strategy.node_rank == 0
    assert strategy.is_distributed is False
    assert strategy.launcher is None
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is strategy.all_gather(tensor) is tensor
    assert strategy.broadcast(obj := ["x"]) is obj
    assert not strategy.reduce_boolean_decision(False, all=False)


def test_root_device_is_the_last_stages() -> None:
    strategy = GPipeStrategy([1, 1])
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    strategy.set_world_ranks()  # as a Trainer does

    assert strategy.root_device == torch.device("cuda", 1)


def test_pipeline_exists_from_setup_to_teardown(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            assert strategy.pipeline is None

        def on_fit_start(self, *_: Any) -> None:
            seen.append(strategy.pipeline)

    seen: list[GPipe | None] = []
    strategy = GPipeStrategy([2, 4], activation_checkpointing="always")

    fitted(tmp_path, strategy, devices=2, callbacks=[Looks()])

    (pipeline,) = seen
    assert pipeline is not None
    assert pipeline.balance == [2, 4]
    assert pipeline.devices == [torch.device("cpu")] * 2
    assert pipeline.chunks == 8, "4 per stage"
    assert pipeline.activation_checkpointing == "always"
    assert strategy.pipeline is None


@pytest.mark.parametrize("threads, expected", [(True, 2), (False, 0)])
def test_a_thread_per_device(tmp_path: Path, threads: bool, expected: int) -> None:
    class Looks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            names.update(each.name for each in workers())

    names: set[str] = set()

    fitted(
        tmp_path,
        GPipeStrategy([1, 2, 1, 2], threads=threads),
        devices=2,
        max_steps=1,
        callbacks=[Looks()],
    )

    assert names == {f"gpipe-worker-{w} (cpu)" for w in range(expected)}


@pytest.mark.parametrize("threads", ["auto", True])
def test_faster_way_is_said(
    tmp_path: Path,
    threads: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        fitted(tmp_path, GPipeStrategy([3, 3], threads=threads), devices=2, max_epochs=6)

    said = re.findall(r"GPipe runs \S+ on (?:one thread for all|a thread for each)", caplog.text)
    assert len(said) in ((1, 2) if threads == "auto" else (0,))
    assert len(set(said)) == len(said)


def test_last_hooks_see_the_plain_module(tmp_path: Path) -> None:
    class Looks(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            pipelined.append("forward" in pl_module.layers.__dict__)

        on_fit_end = on_train_end

        def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
            self.on_train_end(trainer, pl_module)

    pipelined: list[bool] = []

    fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_steps=1, callbacks=[Looks()])

    assert pipelined == [True, False, False], "at the end of training; of the fit; at teardown"


@pytest.mark.parametrize("name", ["training", "validation", "test", "predict"])
def test_step_after_a_fit(tmp_path: Path, name: str) -> None:
    """Each ended with an AssertionError that said nothing, since the pipeline was gone by then."""
    made = fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_steps=1)
    module = made.lightning_module
    calls: list[Any] = []
    setattr(module, f"{name}_step", lambda *args: calls.append(args))

    getattr(made.strategy, f"{name}_step")("a batch", 0)

    assert calls == [("a batch", 0)]
