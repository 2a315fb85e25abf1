"""The strategy's side of a Trainer whose pipelines run in one process or in several.

The processes of one pipeline see the same batches and hold the same values. So nothing is averaged
or summed over them: to a metric, a logger or a user's ``all_gather`` they are one. What is averaged
or gathered is so over replicas, each process with those that have its place in the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
)
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric
from typing_extensions import override

from lightning_gpipe.core.faithful import add_note
from lightning_gpipe.core.run import Engine
from lightning_gpipe.core.transport import RankFailed
from lightning_gpipe.processes.agreement import check_same, shapes
from lightning_gpipe.processes.batches import shared
from lightning_gpipe.processes.gradients import Together
from lightning_gpipe.processes.launching import Terms
from lightning_gpipe.processes.replicated import (
    check_options,
    check_static_graph,
    equalise,
    replicated,
)
from lightning_gpipe.processes.resuming import Resuming


class OverProcesses(Resuming):
    """A strategy of one Trainer, in one process or several.

    Args:
        terms: Which processes there are, and how they are started.
        save_distributed_checkpoint: Whether each process saves its part of a checkpoint itself.
        ddp: Options of the wrapper that averages gradients over replicas.
    """

    def __init__(
        self,
        terms: Terms,
        save_distributed_checkpoint: bool,
        ddp: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(terms, save_distributed_checkpoint)
        check_options(ddp, terms.replicas)
        self._ddp = dict(ddp or {})
        self._together: Together | None = None
        self._accumulates = False  # whether another backward comes before the optimizer's step
        self._averaged: set[int] = set()  # the ids of the parameters whose gradients are
        self._metrics: list[Metric] = []  # that gather from replicas
        self._later: RemovableHandle | None = None
        self._forward_redirection = _DDPForwardRedirection()

    def compare(self, module: nn.Module, **arguments: Any) -> None:
        """Refuse to begin if another process has another model or was given other arguments."""
        if self._circles is not None:
            check_same(self._circles.everyone, arguments | shapes(module))

    def watch(self, engine: Engine) -> None:
        """Let ``engine`` name the processes of its pipeline that have failed, or are lost."""
        if self._circles is not None:
            self._circles.watch(engine)

    def train_together(self, around: Sequence[nn.Parameter], elsewhere: set[str]) -> None:
        """Keep the processes the same from now on, until :meth:`train_apart`.

        Args:
            around: The parameters that each process of a pipeline has.
            elsewhere: The paths of the modules in stages of other processes.
        """
        assert self.lightning_module is not None
        self._elsewhere = elsewhere
        if self.pipeline_group is not None:
            self._together = Together(self.pipeline_group, around, self.precision_plugin)
        if self._circles is None:
            return
        if not self.is_distributed:  # what is logged is the same in all processes
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )
        self._adapt_metrics(self.lightning_module)
        self._later = register_module_module_registration_hook(self._adapt_later)

    def train_apart(self) -> None:
        """End that."""
        if self._together is not None:
            self._together.release()
            self._together = None
        if self._later is not None:
            self._later.remove()
            self._later = None
        for metric in self._metrics:
            metric.process_group = None  # with which it could not be copied
        self._metrics = []
        self._unwrap()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None  # with which it could not be copied

    def replicate(self) -> None:
        """Give all replicas the same values and, in a fit, average their gradients from now on."""
        if self._circles is None or not self.is_distributed:
            return
        module = self.lightning_module
        assert module is not None
        if module.trainer.state.fn != TrainerFn.FITTING:
            equalise(module, self._circles.across)
            return
        check_static_graph(
            self._ddp,
            module.trainer.callbacks,  # type: ignore[attr-defined]  # a connector sets it
            module.trainer.accumulate_grad_batches,
            automatic=module.automatic_optimization,
        )
        self.model = replicated(module, self._circles.across, self._ddp) or module
        self._averaged = _trainable(module)

    def replicate_again(self) -> None:
        """Average the gradients of other parameters, if others need any now."""
        if not self.is_distributed:
            return
        assert self.lightning_module is not None
        if self._averaged != _trainable(self.lightning_module):
            self._unwrap()
            self.replicate()

    def _unwrap(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module

    def _adapt_metrics(self, module: nn.Module) -> None:
        """Let metrics gather from replicas, and not from the processes of one pipeline."""
        assert self._circles is not None
        for metric in module.modules():
            if not isinstance(metric, Metric):
                continue
            if not self.is_distributed:
                metric.distributed_available_fn = _alone
            elif metric.process_group is None:
                metric.process_group = self._circles.across
                self._metrics.append(metric)

    def _adapt_later(self, owner: nn.Module, name: str, module: nn.Module | None) -> None:
        """The same for those that a module gets while the model trains."""
        if module is not None:
            self._adapt_metrics(module)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._circles is not None:
            failure = self._circles.lifeline.failure(0.0)
            if failure is not None and not isinstance(exception, RankFailed):
                add_note(exception, f"{failure}")
            self._circles.lifeline.tell(exception)
            self.train_apart()  # what it adapted refers to the group
            self._circles.leave()
            self._circles = None

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulates = True
        try:
            with super().block_backward_sync():  # it does so for the replicas
                yield
        finally:
            self._accumulates = False

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if isinstance(self.model, DistributedDataParallel):
            assert self.lightning_module is not None
            if not self.lightning_module.automatic_optimization:  # else DDP's forward has done it
                prepare_for_backward(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._together is not None and not self._accumulates:
            self._together.equalise()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader, group = super().process_dataloader(dataloader), self.pipeline_group
        return dataloader if group is None else shared(dataloader, group)

    # What is the same in the processes of a pipeline, and differs between replicas.

    @override
    def reduce(
        self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        if self._circles is None or not self.is_distributed or not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(tensor, self._circles.across, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._circles is None or not self.is_distributed:
            return tensor
        across = self._circles.across
        return _all_gather_ddp_if_available(tensor, group=across, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._circles is None:
            return decision
        return self._circles.everyone.decide(bool(decision), all=all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._circles is not None:
            self._circles.everyone.meet(f"come to {name or 'a barrier'}")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._circles is None else self._circles.everyone.broadcast(obj, src)


def _trainable(module: nn.Module) -> set[int]:
    """The ids of the parameters that need a gradient."""
    return {id(each) for each in module.parameters() if each.requires_grad}


def _alone() -> bool:
    """Tells a metric that there are no other processes."""
    return False
