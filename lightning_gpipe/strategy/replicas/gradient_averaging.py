"""The gradients of replicas become their average, in DDP or without it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.faithful import Attributes, Manager, patched
from lightning_gpipe.core.pipeline import Pipeline
from lightning_gpipe.core.run import leaves_around, own_parameters
from lightning_gpipe.core.schedules import is_by_micro_batch
from lightning_gpipe.core.transport import OWN
from lightning_gpipe.distributed import (
    GradientAverages,
    bucket_bytes,
    check_options,
    check_static_graph,
    equalise,
    equalise_buffers,
    leaves_early,
    replicated,
)
from lightning_gpipe.strategy.pipelined import PipelinedModule
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.replicas.sharding import Sharding


class GradientAveraging:
    """Averages gradients over replicas, those of stages as soon as their sums are known.

    DistributedDataParallel averages the rest, unless gradients are divided among replicas, or
    parameters among the processes of a stage.
    """

    def __init__(self, processes: Processes, sharding: Sharding) -> None:
        options = processes.options
        self._wraps = not options.divides_gradients and options.tensor_parallel == 1
        check_options(options.ddp, options.replicas, wraps=self._wraps)
        self._processes = processes
        self._sharding = sharding
        self._ddp = options.ddp or {}
        self._pipeline: Pipeline | None = None  # if there is a single one
        self._by_micro_batch = False
        self._early: bool | None = None  # whether some gradients do, once the fit has begun
        self._averages: GradientAverages | None = None  # of those that leave early
        self._averaged: set[int] = set()  # the ids of the parameters whose gradients are
        self._buffers_of: nn.Module | None = None  # the module, if it has no wrapper
        self._synchronised = True  # whether the last step averaged gradients
        self._handles: list[RemovableHandle] = []  # of hooks on gradients
        self._in_backward = False  # of the Trainer
        self._accumulates = False  # whether another backward comes before the optimizer's step

    @property
    def without_wrapper(self) -> bool:
        """True if all gradients are averaged without DistributedDataParallel."""
        return self._processes.replicated and not self._wraps

    @property
    def is_due(self) -> bool:
        return self._processes.options.divides_gradients or not self._accumulates

    def begin(self, pipelined: PipelinedModule) -> None:
        self._early, self._synchronised = None, True
        self._pipeline = pipelined.single
        self._by_micro_batch = is_by_micro_batch(pipelined.schedule)

    def wrapped(self, module: LightningModule, around: Collection[nn.Parameter]) -> nn.Module:
        """Give all replicas the values of the first; return the module, in a wrapper if needed.

        The wrapper's backward averages the gradients that do not leave early. ``around`` are the
        parameters that each process has.
        """
        across = self._processes.across
        assert across is not None, "there are replicas, and connected"
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

    def outdated(self, module: LightningModule, wrapper: nn.Module) -> bool:
        """Return True if the module must be wrapped anew.

        That is if other parameters need gradients than before, or the fit begins, from when on
        gradients may leave early: until then the user can register a communication hook, for all.
        """
        early = leaves_early(self._ddp, wrapper)
        if self._early is None:
            divided = self._processes.options.divides_parameters
            by_itself = module.automatic_optimization or divided
            self._early = self._pipeline is not None and by_itself and early
            return self._early or not self._wraps
        if self._averages is not None and not early:
            raise RuntimeError(
                "a communication hook must be registered in on_fit_start: got one after the first "
                "step, by when the gradients of the stages are averaged without it. Call "
                "self.trainer.model.register_comm_hook(state, hook) there."
            )
        return self._averaged != _trainable(module)

    def _average_all(
        self,
        module: nn.Module,
        stages: Mapping[int, Sequence[nn.Parameter]],
        alone: Iterable[nn.Parameter],
    ) -> None:
        """Average all gradients without the wrapper, in their owners if they are divided."""
        across, shares = self._processes.across, self._sharding.shares
        assert across is not None, "there are replicas"
        divides = self._processes.options.divides_gradients
        begun = shares is not None if divides else self._early is not None
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
        """Let a backward raise whose gradients nothing would average."""

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

    # In a step.

    def in_step(self) -> AbstractContextManager[None]:
        """A ``with`` block in which DistributedDataParallel may wait for the other replicas."""
        if self._processes.across is None or not self.is_due:
            return nullcontext()
        return OWN.next("replicas", self._processes.everyone.ranks, "a step of all replicas")

    def accumulating(self) -> Manager:
        """A ``with`` block whose backwards are not the last before the optimizer's step."""
        return patched([(Attributes(self), "_accumulates", True)])

    @contextmanager
    def leaving_early(self, *, loss: Tensor | None = None, adds: bool = True) -> Iterator[None]:
        """A ``with`` block in which the gradients of stages leave early.

        ``loss`` is the one whose backward runs; None for a training step. With ``adds``, gradients
        are added to those of steps before.
        """
        by_trainer = patched([(Attributes(self), "_in_backward", loss is not None)])
        with by_trainer, self._leaving_early(loss, adds=adds):
            yield

    @contextmanager
    def _leaving_early(self, loss: Tensor | None, *, adds: bool) -> Iterator[None]:
        averages, pipeline = self._averages, self._pipeline
        if averages is not None:
            self._sharding.check_hooks(averages.parameters)
        if loss is None:
            self.equalise_buffers()
        if averages is None or not self.is_due:
            yield
            return
        outside: list[Tensor] | None = []
        if loss is not None and loss.requires_grad:
            outside = leaves_around(loss) if averages.buckets else []
            loss.register_hook(partial(_begin_backward, averages))
        ids = set(map(id, averages.parameters if outside is None else outside))
        active = loss is not None or self._by_micro_batch
        with averages.averaging(ids, adds=adds) if active else nullcontext():
            divides = self._processes.options.divides_parameters  # also those of a tied stage
            if pipeline is None or not (averages.buckets or divides):
                yield
                return
            with patched([(Attributes(pipeline.engine), "home", averages)]):
                yield

    def equalise_buffers(self, *, trains: bool = True) -> None:
        """Give all replicas the buffers of the first, as the wrapper would do.

        It does so before each step that ``trains``, and before the first one of an evaluation, but
        not after a step that has averaged no gradients.
        """
        module, across = self._buffers_of, self._processes.across
        if module is None or across is None:
            return
        if self._synchronised and self._ddp.get("broadcast_buffers") is not False:
            equalise_buffers(module, across)
        self._synchronised = trains and not self._accumulates

    def end(self) -> None:
        self._early = self._pipeline = self._averages = self._buffers_of = None
        self._remove_hooks()


def _begin_backward(averages: GradientAverages, _: Tensor) -> None:
    """Average gradients at the end of this backward, before hooks after it, as the wrapper does."""
    averages.set_aside()
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(averages.finish)


def _trainable(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
