"""Refuses by name what Lightning supports, and a pipeline would have to ignore silently."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins import (
    CheckpointIO,
    DeepSpeedPrecision,
    FSDPPrecision,
    Precision,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_gpipe.checkpoints import AtomicFiles
from lightning_gpipe.core.data import is_uneven
from lightning_gpipe.core.faithful import add_note
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.profile import joins_parameters
from lightning_gpipe.strategy.adapters.averages import WeightAveraging
from lightning_gpipe.strategy.options import StrategyOptions

# Precision plugins that a pipeline cannot honour, and what they are for.
_FOREIGN_PRECISION: dict[type[Precision], str] = {
    DeepSpeedPrecision: "DeepSpeedStrategy, whose engine scales and clips gradients",
    FSDPPrecision: "FSDPStrategy, whose wrapped modules cast their parameters",
    TransformerEnginePrecision: "one device: it enters FP8 on the thread of the training step only",
    XLAPrecision: "TPUs",
}

_UNEVEN = "harding propagation failed", "must have same reduction dim"  # the latter before 2.9

AUTO_DEVICES = (
    "devices='auto' means one device on the CPU and in a notebook, and all GPUs elsewhere."
)


def check_environment(devices: Sequence[torch.device], precision: Precision) -> None:
    """Refuse settings of the Trainer that a pipeline cannot honour."""
    kinds = sorted({device.type for device in devices})
    if not {"cpu", "cuda"}.issuperset(kinds):
        raise ValueError(
            "GPipeStrategy runs on Trainer(accelerator='cpu') and Trainer(accelerator='gpu') with "
            f"CUDA devices: got {kinds}."
        )
    for kind, owner in _FOREIGN_PRECISION.items():
        if isinstance(precision, kind):
            raise ValueError(
                f"{kind.__name__} is for {owner}: got Trainer(plugins=[{type(precision).__name__}])"
                ". Write Trainer(precision='bf16-mixed'), or another precision without a plugin."
            )


def check_synchronised(layer_sync: LayerSync | None, options: StrategyOptions) -> None:
    """Refuse to normalise by the rows of all replicas where that cannot be, or means nothing."""
    got = {
        type(layer_sync).__name__: type(layer_sync) is TorchSyncBatchNorm,
        f"replicas={options.replicas}": options.replicas > 1,
        f"deferred_batch_norm={options.deferred_batch_norm}": options.deferred_batch_norm,
        f"compile={options.compile}": options.compile is False,
    }
    if not all(got.values()):
        refused = ", ".join(name for name, fits in got.items() if not fits)
        raise ValueError(
            "Trainer(sync_batchnorm=True) lets batch norms normalise by the rows of all replicas, "
            "and needs replicas=2 or more, deferred_batch_norm=True and compile=False: got "
            f"{refused}. Leave it out for one pipeline: with deferred_batch_norm=True, running "
            "statistics are those of the whole batch."
        )


def check_fit(
    callbacks: Sequence[Callback],
    optimizers: Sequence[Optimizer],
    *,
    split: bool,
    sharded: bool = False,
    divided: bool = False,
    on_host: bool = False,
) -> None:
    """Refuse callbacks and optimizers that a pipeline, or one over processes, cannot honour."""
    for callback in callbacks:
        if split or divided:
            _refuse_without_all_values(callback, split=split)
        if on_host and isinstance(callback, ModelPruning):
            raise ValueError(
                "ModelPruning multiplies each weight by a mask that is a buffer, so both must be "
                "on one device: got weights='host', with buffers on devices. Write "
                "weights='device', or prune once with torch.nn.utils.prune."
            )
        _refuse_global_pruning(callback)
    for optimizer in optimizers:
        places = _devices_of(p for group in optimizer.param_groups for p in group["params"])
        if sharded:
            places = [*places, "replicas that share its states"]
        one_vector = isinstance(optimizer, LBFGS) and len(places) > 1
        if one_vector or ((split or sharded) and joins_parameters(optimizer)):
            raise ValueError(
                f"{type(optimizer).__name__} updates a parameter by the gradients of others, too, "
                f"so a step must have all of them: got {', '.join(places)}. Choose an optimizer "
                "that updates each parameter by itself, such as Adam, or one process and device."
            )


def refuse_several_nodes(num_nodes: int) -> None:
    """Refuse more than one machine."""
    if num_nodes != 1:
        raise ValueError(
            "GPipeStrategy(processes='single') drives the devices of one machine from one process: "
            f"got Trainer(num_nodes={num_nodes}). Write processes='per_node' or 'per_stage', or "
            "num_nodes=1."
        )


def refuse_several_processes(environment: ClusterEnvironment | None) -> None:
    """Refuse to run in one of several processes that a launcher started."""
    if environment is None or not environment.creates_processes_externally:
        return
    processes = environment.world_size()
    if processes > 1:
        raise RuntimeError(
            "GPipeStrategy(processes='single') drives all its devices from one process: "
            f"{type(environment).__name__} started {processes}, and each would run a pipeline of "
            "its own. Write processes='per_stage' for one pipeline over all of them, 'per_node' "
            f"for one over machines, replicas={processes} for a pipeline in each, which train "
            "together, or start the script with python, without torchrun or several tasks."
        )


def refuse_in_parts(callbacks: Iterable[Callback], io: CheckpointIO) -> None:
    """Refuse a callback or CheckpointIO that a checkpoint in parts would go around."""
    others = [
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, WeightAveraging)
        and not isinstance(callback, StochasticWeightAveraging)
    ]
    if type(io) not in (TorchCheckpointIO, AtomicFiles):
        others.append(type(io).__name__)
    if others:
        raise ValueError(
            "save_distributed_checkpoint=True writes with torch.distributed.checkpoint what each "
            f"process has of the model: got {', '.join(others)}, which does something else with "
            "checkpoints. Leave out one of them."
        )


def _refuse_without_all_values(callback: Callback, *, split: bool) -> None:
    if isinstance(callback, StochasticWeightAveraging | ModelPruning):
        own = "its own stages only" if split else "its share, with sharding='parameters'"
        way_out = "processes='single'" if split else "sharding='gradients'"
        raise ValueError(
            f"{type(callback).__name__} needs the values of all parameters, and a process has "
            f"those of {own}. Leave it out, or write {way_out}."
        )


def _refuse_global_pruning(callback: Callback) -> None:
    if isinstance(callback, ModelPruning) and callback._use_global_unstructured:
        pruned = callback._parameters_to_prune or []
        devices = _devices_of(getattr(module, name) for module, name in pruned)
        if len(devices) > 1:
            raise ValueError(
                "ModelPruning(use_global_unstructured=True) ranks all weights in one vector, "
                f"so they must be on one device: got {', '.join(devices)}. Write "
                "use_global_unstructured=False, or parameters_to_prune of one stage."
            )


def _devices_of(tensors: Iterable[Tensor]) -> list[str]:
    return list(dict.fromkeys(str(tensor.device) for tensor in tensors))


def warn_of_one_device(
    balances: Sequence[Any], sizes: Sequence[Sequence[int]], devices: int
) -> None:
    """Warn if nothing runs at the same time, unless the user asked for a single stage."""
    stages = max(map(len, sizes))
    if devices == 1 < stages:
        rank_zero_warn(
            f"All {stages} stages of the pipeline share one device, so nothing runs at the same "
            f"time. Write Trainer(devices={stages}) for a device per stage. {AUTO_DEVICES}"
        )
    elif stages == 1 and all(isinstance(balance, str) for balance in balances):
        one_each = [list(size) for size in sizes]
        rank_zero_warn(
            "A pipeline with one device has one stage, so nothing is pipelined. Give it several "
            "devices, such as Trainer(accelerator='gpu', devices=4), or devices=2 on the CPU; or "
            f"write balance={one_each if len(one_each) > 1 else one_each[0]}, if one stage is "
            f"meant. {AUTO_DEVICES}"
        )


def refuse_pipelines(root: nn.Module) -> None:
    """Refuse a LightningModule that holds a pipeline already."""
    paths = [path for path, module in root.named_modules() if isinstance(module, GPipe)]
    if paths:
        raise TypeError(
            "GPipeStrategy makes the pipeline of a Trainer, from a plain module: got a GPipe as "
            f"{', '.join(paths)} of {type(root).__name__}. Write self.{paths[0]} = nn.Sequential("
            "...) in the LightningModule, without GPipe, and give balance and chunks to "
            "GPipeStrategy(...)."
        )


def refuse_metrics_on_meta(module: nn.Module) -> None:
    """Refuse metrics that were created on the meta device: their values are lost."""
    if names := metrics_on_meta(module):
        raise ValueError(
            "a metric keeps its state outside of parameters and buffers, so it cannot be built on "
            f"the meta device: got {', '.join(names)}. Create it in setup(), or outside of "
            "Trainer.init_module(empty_init=True)."
        )


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Refuse embeddings with sparse gradients, which need DistributedDataParallel."""
    names = [
        name for name, each in module.named_modules() if getattr(each, "sparse", False) is True
    ]
    if names:
        raise ValueError(
            "gradients that replicas divide, or average with tensor_parallel, must be dense: got "
            f"{', '.join(names)} with sparse=True. Leave it out."
        )


def refuse_recomputed_metrics(root: nn.Module, pipeline: GPipe) -> None:
    """Refuse metrics that keep a list of all batches, in layers that are recomputed."""
    if not any(any(piped.pipeline.recomputed(pipeline.chunks)) for piped in pipeline.piped_modules):
        return
    inside = {module for piped in pipeline.piped_modules for module in piped.module.modules()}
    names = [
        name
        for name, metric in root.named_modules()
        if isinstance(metric, Metric)
        and metric in inside
        and any(isinstance(value, list) for value in metric.metric_state.values())
    ]
    if names:
        raise ValueError(
            "a metric that keeps a list of all batches must not be within layers that are "
            f"recomputed, since its list is not saved for that: got {', '.join(names)}. Return "
            "what it needs from the layers and update it in training_step, or write "
            "activation_checkpointing='never'."
        )


def metrics_on_meta(module: nn.Module) -> list[str]:
    """Return the names of metrics with state that was created on the meta device."""
    return [
        name
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
        and any(isinstance(v, Tensor) and v.is_meta for v in metric.metric_state.values())
    ]


def explain_meta(error: BaseException, module: nn.Module) -> None:
    """Note in an error of PyTorch about the meta device which parameters are there, and why."""
    names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if names and isinstance(error, RuntimeError) and re.search(r"\bmeta\b", str(error)):
        add_note(
            error,
            "a process has the parameters that it uses, and the others are on the meta device: got "
            f"{len(names)} of {len(list(module.parameters()))}, such as {names[0]}. For a penalty "
            "write the optimizer's weight_decay, or add that of parameters that are not is_meta; "
            "for a norm of gradients write self.trainer.strategy.grad_norm(self); to call the "
            "model outside of its steps write outputs='all'.",
        )


def explain_shards(error: BaseException, module: nn.Module) -> None:
    """Note in an error of DTensors which parameters are divided unevenly, and what needs more."""
    names = [name for name, parameter in module.named_parameters() if is_uneven(parameter)]
    if names and isinstance(error, RuntimeError) and any(each in str(error) for each in _UNEVEN):
        add_note(
            error,
            "RowwiseParallel takes features that are divided evenly among the processes of a "
            "stage, as ColwiseParallel hands them over: got "
            f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}. Use a number of "
            "features that tensor_parallel divides, or ColwiseParallel("
            "output_layouts=Replicate()) before RowwiseParallel(input_layouts=Replicate()).",
        )


def refuse_a_second_trainer(accelerator: Accelerator | None) -> None:
    """Refuse a second Trainer; the first one has set its accelerator."""
    if accelerator is not None:
        raise RuntimeError(
            "a GPipeStrategy object belongs to one Trainer: got one that another Trainer has. "
            "Write GPipeStrategy(...) again for this Trainer, or use the first Trainer again."
        )
