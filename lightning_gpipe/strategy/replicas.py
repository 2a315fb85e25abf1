"""Replicas of a pipeline, and the processes of each, train together.

The processes of one pipeline see the same batches and hold the same values. So nothing is averaged
or summed over them: to a metric, a logger or a user's ``all_gather`` they are one. What is averaged
or gathered is so over replicas, each process with those that have its place in the others.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
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
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_gpipe.core.data import divided_like
from lightning_gpipe.core.faithful import (
    NOTHING,
    Attributes,
    Journal,
    Manager,
    check_batch_norms,
    has_hooks,
    over_replicas,
)
from lightning_gpipe.core.frontends import forget_values, is_in_another_process, recall
from lightning_gpipe.core.pipeline import Pipeline
from lightning_gpipe.core.run import leaves_around
from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.core.transport import OWN
from lightning_gpipe.distributed import (
    GradientAverages,
    GradientsAround,
    Group,
    OptimizerShards,
    ReplicaWeights,
    SameParameters,
    Shares,
    WorldSizeCalls,
    bucket_bytes,
    check_alike,
    check_options,
    check_static_graph,
    divisible,
    drop_values,
    equalise,
    equalise_buffers,
    gather_values,
    gathered,
    gradient_norms,
    leaves_early,
    own_parameters,
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
        self._divides_gradients = processes.options.divides_gradients
        self._divides_parameters = processes.options.divides_parameters
        # DistributedDataParallel takes no DTensors.
        self._wraps = not self._divides_gradients and processes.options.tensor_parallel == 1
        check_options(ddp, processes.options.replicas, wraps=self._wraps)
        self._processes = processes
        self._ddp = dict(ddp or {})
        self._averaged: set[int] = set()  # the ids of the parameters whose gradients are
        self._averages: GradientAverages | None = None  # of those that leave early
        self._early: bool | None = None  # whether some do, once the fit has begun
        self._pipeline: Pipeline | None = None  # if there is one
        self._by_micro_batch = False
        self._buffers_of: nn.Module | None = None  # the module, if it has no wrapper
        self._synchronised = True  # whether the last step averaged gradients
        self._together: SameParameters | None = None
        self._parts: GradientsAround | None = None
        self._shares: Shares | None = None  # if replicas have shares of anything
        self._shards: OptimizerShards | None = None
        self._divided: list[nn.Parameter] = []  # among the processes of a stage
        self._undivided: dict[str, nn.Parameter] = {}  # to be compared among these
        self._handles: list[RemovableHandle] = []  # of hooks on gradients
        self._in_backward = False  # of the Trainer
        self._waits = 0  # in steps, so far
        self._evaluations = 0  # the same
        self._accumulates = False  # whether another backward comes before the optimizer's step
        self._changes = Journal()  # of torch.distributed and torchmetrics
        self.world_size_calls = WorldSizeCalls()
        self.synchronising: Callable[[], Manager] = _apart

    @property
    def _across(self) -> ProcessGroup | None:
        groups = self._processes.groups
        return groups.across if groups is not None and self._processes.replicated else None

    @property
    def _everyone(self) -> Group:
        assert self._processes.groups is not None, "replicas are connected"
        return self._processes.groups.everyone

    # Values and gradients.

    def gather_parameters(self, module: nn.Module, device: torch.device) -> None:
        """Give each replica the parameters that a fit before has divided; it has a ``device``.

        That fit may have been of another strategy.
        """
        if self._across is None:
            return
        lacks_values = any(map(is_in_another_process, module.parameters()))
        if self._processes.decide(lacks_values, all=False):
            self._processes.check_same(module)
            gather_values(module, self._across, device)

    def divide_parameters(self, module: nn.Module, pipelined: PipelinedModule) -> None:
        """Divide the parameters of stages among replicas until :meth:`end`, if the user asks.

        Raises:
            ValueError: If several modules are pipelines.
        """
        across, groups = self._across, self._processes.groups
        if across is None or groups is None or not self._divides_parameters:
            return
        if len(pipelined.modules) > 1:
            raise ValueError(
                "sharding='parameters' is for one pipelined module: got "
                f"{len(pipelined.modules)}. Name one by module=..., or write sharding='gradients'."
            )
        pipeline = pipelined.modules[0].pipeline
        stages = divisible(module, pipeline.layout)
        parameters = list(chain.from_iterable(stages.values()))
        self._shares = shares = self._shares or Shares(across, pipelined.around())
        shares.keep(parameters)
        drop_values(module, parameters, shares)
        options = stages, pipeline.layout, groups.of_weights, shares, groups.lifeline
        weights = ReplicaWeights(*options, bucket_bytes(self._ddp))
        pipeline.divide((x for x in parameters if x.is_meta), weights)
        named = module.named_parameters(remove_duplicate=False)
        self._processes.kept = {n for n, x in named if shares.keeps(x) and shares.is_own(x)}

    def wrapped(self, module: LightningModule, around: Collection[nn.Parameter]) -> nn.Module:
        """Give all replicas the values of the first.

        ``around`` are the parameters that each process of a pipeline has.

        Returns:
            In a fit a wrapper whose backward averages the gradients over replicas that do not leave
            early; the module itself otherwise, if no such parameter here needs a gradient, or if
            gradients are divided among replicas.
        """
        across, groups = self._across, self._processes.groups
        assert across is not None and groups is not None, "there are replicas, and connected"
        self._averages = None
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
        alone = list(around) if self._processes.at_last else []  # see SameParameters
        early, pipeline = self._early, self._pipeline
        stages = own_parameters(module, pipeline.layout) if early and pipeline is not None else None
        if not self._wraps:
            self._average_all(module, stages or {}, alone)
            return module
        if stages is None:
            return replicated(module, across, self._ddp, alone) or module
        if any(stages.values()):
            self._averages = self._averages_of(stages)
        averaged = alone if self._averages is None else [*self._averages.parameters, *alone]
        wrapper = replicated(module, across, {**self._ddp, "init_sync": False}, averaged)
        self._buffers_of = module if wrapper is None and self._averages is not None else None
        return wrapper or module

    def _average_all(
        self,
        module: nn.Module,
        stages: Mapping[int, Sequence[nn.Parameter]],
        alone: Iterable[nn.Parameter],
    ) -> None:
        """Let all gradients be averaged without the wrapper, once a fit has begun.

        They are in the owners of their parameters, if replicas share them.
        """
        across, shares = self._across, self._shares
        assert across is not None, "there are replicas"
        begun = shares is not None if self._divides_gradients else self._early is not None
        if not begun:
            if self._ddp.get("init_sync") is not False:
                equalise(module, across)
            return
        if shares is not None:
            shares.add(module.parameters())
        others = {id(parameter) for parameter in chain(alone, *stages.values())}
        rest = [
            p
            for p in module.parameters()
            if not (p.is_meta or (shares is not None and shares.keeps(p)) or id(p) in others)
        ]
        self._averages = self._averages_of(stages, shares=shares, rest=rest)
        self._buffers_of = module
        if shares is None and not module.automatic_optimization:
            self._refuse_other_backwards(rest)

    def _refuse_other_backwards(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let a backward raise whose gradients nothing would average.

        Without shares of gradients, an optimizer's step could not tell them from averages.
        """

        def check(_: Tensor) -> None:
            if not (self._in_backward or self._accumulates):
                raise RuntimeError(
                    "gradients are averaged over replicas in a backward of the Trainer's: got "
                    "another backward. With manual optimization write self.manual_backward(loss), "
                    "not loss.backward()."
                )

        self._remove_hooks()
        trainable = (each for each in parameters if each.requires_grad)
        self._handles = [each.register_post_accumulate_grad_hook(check) for each in trainable]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _averages_of(
        self, stages: Mapping[int, Sequence[nn.Parameter]], **options: Any
    ) -> GradientAverages:
        groups = self._processes.groups
        assert groups is not None and groups.reductions is not None, "there are replicas"
        cap = bucket_bytes(self._ddp)
        return GradientAverages(stages, groups.reductions, groups.lifeline, cap, **options)

    def outdated(self, module: LightningModule, wrapper: nn.Module) -> bool:
        """True if the module must be wrapped anew.

        That is if other parameters need gradients than before, or the fit begins, from when on
        gradients may leave early: until then the user can register a communication hook, for all.

        Raises:
            RuntimeError: If the user registers one later.
        """
        early = leaves_early(self._ddp, wrapper)
        if self._early is None:
            by_itself = module.automatic_optimization or self._divides_parameters
            self._early = self._pipeline is not None and by_itself and early
            return self._early or not self._wraps
        if self._averages is not None and not early:
            raise RuntimeError(
                "a communication hook must be registered in on_fit_start: got one after the first "
                "step, by when the gradients of the stages are averaged without it. Call "
                "self.trainer.model.register_comm_hook(state, hook) there."
            )
        return self._averaged != _trainable(module)

    @property
    def averages_all(self) -> bool:
        """True if all gradients are averaged without DistributedDataParallel."""
        return self._processes.replicated and not self._wraps

    @contextmanager
    def averaging(self, *, loss: Tensor | None = None, adds: bool = True) -> Iterator[None]:
        """A ``with`` block in which the gradients of stages leave early.

        Args:
            loss: The loss whose backward runs; None for a training step.
            adds: Whether its gradients are added to those of steps before.
        """
        by_trainer = Journal().changed([(Attributes(self), "_in_backward", loss is not None)])
        with by_trainer, self._averaging(loss, adds=adds):
            yield

    @contextmanager
    def _averaging(self, loss: Tensor | None, *, adds: bool) -> Iterator[None]:
        averages, pipeline, across = self._averages, self._pipeline, self._across
        if self._divides_parameters and averages is not None:
            self._check_hooks(averages.parameters)
        if loss is None and self._buffers_of is not None and across is not None:
            if self._synchronised and self._ddp.get("broadcast_buffers") is not False:
                equalise_buffers(self._buffers_of, across)  # as the wrapper would do
            self._synchronised = not self._accumulates
        if averages is None or not self._averages_now:
            yield
            return
        outside: list[Tensor] | None = []
        if loss is not None and loss.requires_grad:
            outside = leaves_around(loss) if averages.buckets else []
            loss.register_hook(partial(_begin_backward, averages))
        ids = set(map(id, averages.parameters if outside is None else outside))
        active = loss is not None or self._by_micro_batch
        with averages.averaging(ids, adds=adds) if active else nullcontext():
            if pipeline is None or not averages.buckets:
                yield
                return
            before, pipeline.engine.home = pipeline.engine.home, averages
            try:
                yield
            finally:
                pipeline.engine.home = before

    def _check_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse hooks that would see the gradients of one replica only."""
        shares = self._shares
        if shares is not None and any(shares.keeps(x) and has_hooks(x) for x in parameters):
            raise RuntimeError(
                "a hook on the gradient of a parameter that replicas divide must be there before "
                "the fit, so that each replica keeps the parameter: got one that was registered "
                "later. Register it in configure_model() or setup(), or write "
                "sharding='gradients'."
            )

    def accumulating(self) -> Manager:
        """A ``with`` block whose backwards are not the last before the optimizer's step."""
        return Journal().changed([(Attributes(self), "_accumulates", True)])

    def in_step(self) -> AbstractContextManager[None]:
        """A ``with`` block in which DistributedDataParallel may wait for the other replicas."""
        if self._across is None or not self._averages_now:
            return nullcontext()
        self._waits += 1
        return OWN.within("replicas", self._waits, self._everyone.ranks, "a step of all replicas")

    def in_evaluation(self) -> AbstractContextManager[None]:
        """A ``with`` block in which a step may wait for parameters of the other replicas."""
        if self._across is None or not self._divides_parameters:
            return nullcontext()
        self._evaluations += 1
        number, ranks = self._evaluations, self._everyone.ranks
        return OWN.within("evaluations", number, ranks, "an evaluation step of all replicas")

    def equalise_stage(self, module: nn.Module) -> None:
        """Give all processes of a stage the same values of what they have no shards of."""
        groups = self._processes.groups
        if groups is not None and self._processes.options.tensor_parallel > 1:
            with self._everyone.waiting_for("the values that the processes of a stage share"):
                equalise(module, groups.stage, shards=False)

    def synchronise(self, piped: PipelinedModule) -> None:
        """Let batch norms normalise by the rows of all replicas, if the Trainer asks for it.

        Raises:
            ValueError: If one around the stages has a forward of its own.
        """
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
        if self._together is not None:
            self._together.begin()

    def at_ends(self) -> list[nn.Parameter]:
        """Return the parameters around that only processes of the first and last stage have."""
        return [] if self._parts is None else self._parts.at_ends

    def after_backward(self, *, called: bool, alone: bool) -> bool:
        """Give the processes of a pipeline the same gradients of what each of them has.

        Returns:
            Whether some parameters have no values here any more, see
            :meth:`GradientsAround.add_up`.
        """
        for parameter in self._divided:
            if parameter.grad is not None:
                parameter.grad = divided_like(parameter.grad, parameter)
        undivided, self._undivided = self._undivided, {}
        if undivided and self._processes.groups is not None:
            check_alike(undivided, self._processes.groups.stage)
        if self._together is None or not self._averages_now:
            return False
        dropped = self._together.equalise(called=called, alone=alone)
        if dropped:
            gc.collect()  # graphs hold parameters, and may be in a cycle of objects with an error
        for parameter in dropped:
            parameter.grad = None
            forget_values(parameter)
        return bool(dropped)

    @property
    def _averages_now(self) -> bool:
        """True if a backward averages gradients."""
        return self._divides_gradients or not self._accumulates

    def begin(self, precision: Precision, pipelined: PipelinedModule) -> None:
        """Keep the processes the same from now on, until :meth:`end`."""
        processes, around = self._processes, pipelined.around()
        self._early, self._synchronised = None, True
        modules = pipelined.modules
        self._pipeline = modules[0].pipeline if len(modules) == 1 else None
        self._by_micro_batch = is_by_micro_batch(pipelined.schedule)
        group, everyone, parts = processes.pipeline_group, None, None
        self._divided = pipelined.divided()
        shards = processes.options.tensor_parallel > 1
        self._undivided = pipelined.undivided() if shards else {}
        for parameter in around if group is not None else ():
            recall(parameter, modules[0].pipeline.layout.outside)  # after another fit
        sharding = processes.options.sharding
        if sharding is not None and self._across is not None and self._shares is None:
            self._shares = Shares(self._across, around)
        if self._divides_gradients:
            everyone = self._everyone
            group, around = (everyone, []) if group is None else (group, around)
        if group is not None:
            layout = modules[0].pipeline.layout
            if processes.at_last:
                parts = GradientsAround(
                    around,
                    group,
                    self._everyone,
                    self._across,
                    layout.owner_of(0),
                    pipelined.shared(),
                    alone=pipelined.run_by_ends,
                    shares=self._shares if self._divides_gradients else None,
                )
            self._parts = parts
            self._together = SameParameters(
                group, around, precision, parts, everyone, processes.replica_group
            )
        if processes.groups is None:
            return
        self._waits = self._evaluations = 0
        self._changes = Journal()  # a new one: a fork abandons those that exist
        if not processes.replicated:  # what is logged is the same in all processes
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )
        self._changes.write([(Attributes(Metric), "sync", _over(self._across))])
        if processes.split:
            self._changes.write(self.world_size_calls.watch(processes.options.replicas))

    def divide(self, optimizers: Sequence[Optimizer]) -> None:
        """Let each replica step a share of the parameters until :meth:`end`, if the user asks."""
        if self._shares is not None:
            self._shards = OptimizerShards(
                optimizers, self._shares, self.in_step, divides_gradients=self._divides_gradients
            )

    def drop_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Drop the states of optimizers that other replicas have, as after loading them."""
        if self._shards is not None:
            for optimizer in optimizers:
                self._shards.drop_states(optimizer)

    def end(self) -> None:
        if self._shards is not None:
            self._shards.release()
        self._shards = self._shares = self._early = None
        self._pipeline = self._averages = self._buffers_of = None
        self._divided, self._undivided = [], {}
        self._remove_hooks()
        if self._together is not None:
            self._together.release()
            self._together = self._parts = None
        self.world_size_calls.release()
        self._changes.undo()

    def grad_norm(self, module: nn.Module, norm_type: float, separator: str) -> dict[str, float]:
        """Return the norms of the gradients of all processes of a pipeline, by name."""
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
        across = self._across
        if across is None or not isinstance(tensor, Tensor):
            return tensor
        with self._waiting_for("a reduction over replicas"):
            return _sync_ddp_if_available(tensor, across, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor:
        across = self._across
        if across is None:
            return tensor
        with self._waiting_for("the values of all replicas"):
            return _all_gather_ddp_if_available(tensor, group=across, sync_grads=sync_grads)

    def _waiting_for(self, what: str) -> AbstractContextManager[None]:
        """A ``with`` block that all processes enter.

        If outputs are for the last stage, those that have it may do so alone, in a step.
        """
        alone = self._processes.at_last
        return nullcontext() if alone else self._everyone.waiting_for(what)


def _apart() -> Manager:
    """Return a ``with`` block in which each replica normalises by its own rows."""
    return NOTHING  # a function with a name, since a spawned process gets it pickled


def _begin_backward(averages: GradientAverages, _: Tensor) -> None:
    """Average gradients at the end of this backward, before hooks after it, as the wrapper does."""
    averages.set_aside()
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(averages.finish)


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
