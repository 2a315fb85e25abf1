"""Sharding: replicas divide tensors among them, of which each has whole copies otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gpipe.core.faithful import has_hooks
from lightning_gpipe.core.frontends import is_in_another_process
from lightning_gpipe.distributed import (
    OptimizerShards,
    ReplicaWeights,
    Shares,
    bucket_bytes,
    divisible,
    drop_values,
    gather_values,
    shapes,
    undoing_fully_shard,
)
from lightning_gpipe.strategy.pipelined import PipelinedModule
from lightning_gpipe.strategy.processes import Processes


class Sharding:
    """Gives each replica its share of optimizer states, gradients and parameters.

    ``shares`` has the owners from :meth:`begin` to :meth:`end`; None if nothing is divided.
    """

    def __init__(self, processes: Processes) -> None:
        self.shares: Shares | None = None
        self.kept: set[str] = set()  # names in a state dict, of what this process alone has
        self._processes = processes
        self._optimizers: OptimizerShards | None = None

    def gather_parameters(self, module: nn.Module, device: torch.device) -> None:
        """Give each replica the parameters that a fit before, of any strategy, has divided."""
        across = self._processes.across
        if across is None:
            return
        lacks_values = any(map(is_in_another_process, module.parameters()))
        if self._processes.decide(lacks_values, all=False):
            self._processes.check_same(shapes(module))
            gather_values(module, across, device)

    def undoing_fully_shard(self, module: nn.Module | None) -> AbstractContextManager[None]:
        """A ``with`` block in which the user may divide parameters among replicas, too."""
        groups = self._processes.groups
        if module is None or groups is None:
            return nullcontext()
        mesh = groups.mesh["data_parallel"]
        return undoing_fully_shard(module, mesh, divides=self._processes.options.divides_parameters)

    def divide_parameters(self, module: nn.Module, pipelined: PipelinedModule) -> None:
        across, groups = self._processes.across, self._processes.groups
        if across is None or groups is None or not self._processes.options.divides_parameters:
            return
        pipeline = pipelined.single
        if pipeline is None:
            raise ValueError(
                "sharding='parameters' is for one pipeline: got "
                f"{len(pipelined.modules)}. Name one by module=..., write sharding='gradients', or "
                "a schedule with a loss for each micro-batch, under which they are one."
            )
        stages = divisible(module, pipeline.layout)
        parameters = list(chain.from_iterable(stages.values()))
        self.shares = shares = self.shares or Shares(across, pipelined.around())
        shares.keep(parameters)
        drop_values(module, parameters, shares)
        options = stages, pipeline.layout, groups.of_weights, shares, groups.lifeline
        weights = ReplicaWeights(*options, bucket_bytes(self._processes.options.ddp or {}))
        pipeline.divide((x for x in parameters if x.is_meta), weights)
        named = module.state_dict(keep_vars=True).items()  # where modules may rename them
        own = {id(x) for x in parameters if shares.keeps(x) and shares.is_own(x)}
        self.kept = {name for name, x in named if id(x) in own}

    def begin(self, around: Collection[nn.Parameter]) -> None:
        across = self._processes.across
        if self._processes.options.sharding is not None and across is not None:
            self.shares = self.shares or Shares(across, around)

    def divide_optimizers(
        self, optimizers: Sequence[Optimizer], averaging: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Let each replica step its share of the parameters, if there are shares.

        In ``averaging()`` processes wait for other replicas.
        """
        if self.shares is not None:
            self._optimizers = OptimizerShards(
                optimizers,
                self.shares,
                averaging,
                divides_gradients=self._processes.options.divides_gradients,
            )

    def drop_states(self, optimizers: Iterable[Optimizer]) -> None:
        if self._optimizers is not None:
            for optimizer in optimizers:
                self._optimizers.drop_states(optimizer)

    def check_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse hooks that would see the gradients of one replica only."""
        shares = self.shares
        if not self._processes.options.divides_parameters or shares is None:
            return
        if any(shares.keeps(each) and has_hooks(each) for each in parameters):
            raise RuntimeError(
                "a hook on the gradient of a parameter that replicas divide must be there before "
                "the fit, so that each replica keeps the parameter: got one that was registered "
                "later. Register it in configure_model() or setup(), or write "
                "sharding='gradients'."
            )

    def end(self) -> None:
        if self._optimizers is not None:
            self._optimizers.release()
        self._optimizers = self.shares = None
