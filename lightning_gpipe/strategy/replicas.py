"""Replicas of a pipeline, and the processes of each, train together.

The processes of one pipeline see the same batches and hold the same values. So nothing is averaged
or summed over them: to a metric, a logger or a user's ``all_gather`` they are one. What is averaged
or gathered is so over replicas, each process with those that have its place in the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torchmetrics import Metric

from lightning_gpipe.core.faithful import (
    NOTHING,
    Attributes,
    Journal,
    Manager,
    check_batch_norms,
    over_replicas,
)
from lightning_gpipe.core.transport import OWN
from lightning_gpipe.distributed import (
    Group,
    SameParameters,
    WorldSizeCalls,
    check_options,
    check_static_graph,
    equalise,
    gathered,
    gradient_norms,
    replicated,
)
from lightning_gpipe.strategy.pipelined import PipelinedModule
from lightning_gpipe.strategy.processes import Processes


class Replicas:
    """Keeps the values and gradients of several processes the same, while a model trains.

    Args:
        processes: The processes of the Trainer.
        ddp: Options of DistributedDataParallel, which averages gradients over replicas.

    Attributes:
        synchronising: Returns a ``with`` block in which batch norms around the stages normalise by
            the rows of all replicas, if the Trainer asks for it.

    Raises:
        ValueError: If ``ddp`` has no such options.
    """

    def __init__(self, processes: Processes, ddp: Mapping[str, Any] | None) -> None:
        check_options(ddp, processes.options.replicas)
        self._processes = processes
        self._ddp = dict(ddp or {})
        self._averaged: set[int] = set()  # the ids of the parameters whose gradients are
        self._together: SameParameters | None = None
        self._waits = 0  # in steps, so far
        self._accumulates = False  # whether another backward comes before the optimizer's step
        self._changes = Journal()  # of torch.distributed and torchmetrics
        self.world_size_calls = WorldSizeCalls()
        self.synchronising: Callable[[], Manager] = lambda: NOTHING

    @property
    def _across(self) -> ProcessGroup | None:
        groups = self._processes.groups
        return groups.across if groups is not None and self._processes.replicated else None

    @property
    def _everyone(self) -> Group:
        assert self._processes.groups is not None, "replicas are connected"
        return self._processes.groups.everyone

    # Values and gradients.

    def wrapped(self, module: LightningModule) -> nn.Module:
        """Give all replicas the values of the first.

        Returns:
            In a fit a wrapper whose backward averages the gradients over replicas; the module
            itself otherwise, and if no parameter here needs a gradient.
        """
        across = self._across
        assert across is not None, "there are replicas, and they are connected"
        if module.trainer.state.fn != TrainerFn.FITTING:
            equalise(module, across)
            return module
        check_static_graph(
            self._ddp,
            module.trainer.callbacks,  # type: ignore[attr-defined]  # a connector sets it
            module.trainer.accumulate_grad_batches,
            automatic=module.automatic_optimization,
        )
        self._averaged = _trainable(module)
        return replicated(module, across, self._ddp) or module

    def outdated(self, module: LightningModule) -> bool:
        """True if other parameters need gradients than when the module was wrapped."""
        return self._averaged != _trainable(module)

    def accumulating(self) -> Manager:
        """A ``with`` block whose backwards are not the last before the optimizer's step."""
        return Journal().changed([(Attributes(self), "_accumulates", True)])

    def in_step(self) -> AbstractContextManager[None]:
        """A ``with`` block in which DistributedDataParallel may wait for the other replicas."""
        if self._across is None or self._accumulates:
            return nullcontext()
        self._waits += 1
        return OWN.within("replicas", self._waits, self._everyone.ranks, "a step of all replicas")

    def synchronise(self, piped: PipelinedModule) -> None:
        """Let batch norms normalise by the rows of all replicas, if the Trainer asks for it.

        Raises:
            ValueError: If one around the stages has a forward of its own.
        """
        self.synchronising = lambda: NOTHING
        groups = self._processes.groups
        if groups is None or not groups.of_norms:
            return
        *of_workers, around = (partial(gathered, group) for group in groups.of_norms)
        for each in piped.modules:
            each.pipeline.engine.synchronise(of_workers)
        norms = piped.norms_around()
        check_batch_norms(list(norms.values()), list(norms))
        self.synchronising = partial(over_replicas, list(norms.values()), around)

    def after_backward(self) -> None:
        """Give the processes of a pipeline the same gradients of what each of them has."""
        if self._together is not None and not self._accumulates:
            self._together.equalise()

    def begin(self, precision: Precision, around: Sequence[nn.Parameter]) -> None:
        """Keep the processes the same from now on, until :meth:`end`.

        ``around`` are the parameters that each process of a pipeline has.
        """
        processes = self._processes
        if processes.pipeline_group is not None:
            self._together = SameParameters(processes.pipeline_group, around, precision)
        if processes.groups is None:
            return
        self._waits = 0
        self._changes = Journal()  # a new one: a fork abandons those that exist
        if not processes.replicated:  # what is logged is the same in all processes
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )
        self._changes.write([(Attributes(Metric), "sync", _over(self._across))])
        if processes.split:
            self._changes.write(self.world_size_calls.watch(processes.options.replicas))

    def end(self) -> None:
        if self._together is not None:
            self._together.release()
            self._together = None
        self.world_size_calls.release()
        self._changes.undo()

    def grad_norm(self, module: nn.Module, norm_type: float, separator: str) -> dict[str, float]:
        """Return the norms of the gradients of all processes of a pipeline, by name."""
        named = dict(module.named_parameters())
        of_all = gradient_norms if self._together is None else self._together.norms
        pairs = zip(named, of_all(list(named.values()), norm_type), strict=True)
        prefix = f"grad_{norm_type}_norm"
        norms = {f"{prefix}{separator}{name}": x for name, x in pairs if x is not None}
        total = torch.linalg.vector_norm(torch.tensor([*norms.values()]).double(), norm_type)
        return {**norms, f"{prefix}_total": float(total)}

    # Reductions.

    def reduce(self, tensor: Any, reduce_op: ReduceOp | str | None) -> Any:
        across = self._across
        if across is None or not isinstance(tensor, Tensor):
            return tensor
        with self._everyone.waiting_for("a reduction over replicas"):
            return _sync_ddp_if_available(tensor, across, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor:
        across = self._across
        if across is None:
            return tensor
        with self._everyone.waiting_for("the values of all replicas"):
            return _all_gather_ddp_if_available(tensor, group=across, sync_grads=sync_grads)


def _trainable(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def _over(across: ProcessGroup | None) -> Callable[..., None]:
    """Return a ``Metric.sync`` that gathers from replicas, not from processes of one pipeline."""
    sync = Metric.sync

    @wraps(sync)
    def sync_over(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: ProcessGroup | None = None,
        should_sync: bool = True,
        **kwargs: Any,
    ) -> None:
        group = process_group or metric.process_group or across
        sync(metric, dist_sync_fn, group, should_sync and group is not None, **kwargs)

    return sync_over
