"""Replicas of a pipeline, and the processes of each, train together.

To a metric, a logger or a user's ``all_gather`` the processes of one pipeline are one, as they see
the same batches: averages and gathers are over the processes with one place in all replicas.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.pytorch.plugins import Precision
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
from lightning_gpipe.core.frontends import forget_values, recall
from lightning_gpipe.core.transport import OWN
from lightning_gpipe.distributed import (
    GradientsAround,
    Group,
    SameParameters,
    WorldSizeCalls,
    gathered,
    gathered_with_gradients,
    gradient_norms,
)
from lightning_gpipe.strategy.last_outputs import LastOutputs
from lightning_gpipe.strategy.pipelined import PipelinedModule
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.replicas.gradient_averaging import GradientAveraging
from lightning_gpipe.strategy.replicas.sharding import Sharding


class Replicas:
    """Keeps the values of several processes the same, while a model trains.

    In ``synchronising()`` batch norms around the stages normalise by the rows of all replicas.
    """

    def __init__(
        self, processes: Processes, sharding: Sharding, averaging: GradientAveraging
    ) -> None:
        self._processes = processes
        self._sharding = sharding
        self._averaging = averaging
        self._together: SameParameters | None = None
        self._parts: GradientsAround | None = None
        self._changes = Journal()  # of torch.distributed and torchmetrics
        self.world_size_calls = WorldSizeCalls()
        self.synchronising: Callable[[], Manager] = _apart

    # Values and gradients.

    def synchronise(self, piped: PipelinedModule) -> None:
        """Let batch norms normalise by the rows of all replicas, if the Trainer asks for it."""
        self.synchronising = _apart
        groups = self._processes.groups
        if groups is None or not groups.of_norms:
            return
        *of_workers, around = (partial(gathered, group) for group in groups.of_norms)
        for each in piped.modules:
            each.pipeline.engine.synchronise(of_workers)
        norms = piped.norms_around()
        check_batch_norms(list(norms.values()), list(norms))
        self.synchronising = partial(over_replicas, list(norms.values()), around)

    def before_backward(self) -> None:
        if self._parts is not None:
            self._parts.begin()

    def at_ends(self) -> list[nn.Parameter]:
        return [] if self._parts is None else self._parts.at_ends

    def after_backward(self, last: LastOutputs | None) -> bool:
        """Equalise gradients around the stages; return True if some values are lost here."""
        if self._together is None or not self._averaging.is_due:
            return False
        if self._parts is None or last is None:
            self._together.equalise()
            return False
        dropped = self._parts.add_up(called=last.called, alone=last.alone)
        if dropped:
            gc.collect()  # graphs hold parameters, and may be in a cycle of objects with an error
        for parameter in dropped:
            parameter.grad = None
            forget_values(parameter)
        return bool(dropped)

    def begin(self, precision: Precision, pipelined: PipelinedModule) -> None:
        """Keep the processes the same from now on, until :meth:`end`."""
        processes, around = self._processes, pipelined.around()
        layout = pipelined.modules[0].pipeline.layout
        group, everyone = processes.pipeline_group, None
        for parameter in around if group is not None else ():
            recall(parameter, layout.outside)  # after another fit
        self._sharding.begin(around)
        self._averaging.begin(pipelined)
        if processes.options.divides_gradients:
            everyone = processes.everyone
            group, around = (everyone, []) if group is None else (group, around)
        if group is not None:
            at_last = processes.at_last
            self._parts = self._homes(pipelined, around, group) if at_last else None
            across = processes.replica_group
            self._together = SameParameters(group, around, precision, everyone, across)
        if processes.groups is not None:
            self._change_libraries()

    def _homes(
        self, pipelined: PipelinedModule, around: Sequence[nn.Parameter], group: Group
    ) -> GradientsAround:
        processes = self._processes
        return GradientsAround(
            around,
            group,
            processes.everyone,
            processes.across,
            pipelined.modules[0].pipeline.layout.owner_of(0),
            pipelined.shared(),
            alone=pipelined.run_by_ends,
            shares=self._sharding.shares if processes.options.divides_gradients else None,
        )

    def _change_libraries(self) -> None:
        """Let torchmetrics and Lightning take the processes of a pipeline for one."""
        processes = self._processes
        self._changes = Journal()  # a new one: a fork abandons those that exist
        if not processes.replicated:  # what is logged is the same in all processes
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )
        self._changes.write([(Attributes(Metric), "sync", _over(processes.across))])
        if processes.split:
            self._changes.write(self.world_size_calls.watch(processes.options.replicas))

    def end(self) -> None:
        OWN.forget("replicas", "weights", "gradients")
        self._sharding.end()
        self._averaging.end()
        if self._together is not None:
            self._together.release()
            self._together = self._parts = None
        self.world_size_calls.release()
        self._changes.undo()

    def grad_norm(self, module: nn.Module, norm_type: float, separator: str) -> dict[str, float]:
        named = dict(module.named_parameters())
        of_all = gradient_norms if self._together is None else self._together.norms
        pairs = zip(named, of_all(list(named.values()), norm_type), strict=True)
        prefix = f"grad_{norm_type}_norm"
        norms = {f"{prefix}{separator}{name}": x for name, x in pairs if x is not None}
        total = torch.linalg.vector_norm(
            torch.tensor([*norms.values()], dtype=torch.float64), norm_type
        )
        return {**norms, f"{prefix}_total": float(total)}

    # Reductions.

    def reduce(self, tensor: Any, reduce_op: ReduceOp | str | None) -> Any:
        across = self._processes.across
        if across is None or not isinstance(tensor, Tensor):
            return tensor
        with self._waiting_for("a reduction over replicas"):
            return _sync_ddp_if_available(tensor, across, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor:
        across = self._processes.across
        if across is None:
            return tensor
        with self._waiting_for("the values of all replicas"):
            if sync_grads:
                return gathered_with_gradients(across, tensor)
            return _all_gather_ddp_if_available(tensor, group=across)

    def _waiting_for(self, what: str) -> AbstractContextManager[Any]:
        """A ``with`` block that all enter, unless the last stage may be alone in a step."""
        alone = self._processes.at_last
        return nullcontext() if alone else self._processes.everyone.waiting_for(what)


def _apart() -> Manager:
    return NOTHING  # a function with a name, since a spawned process gets it pickled


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
