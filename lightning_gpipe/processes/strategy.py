"""The strategy's side of a Trainer whose pipeline runs in one process or in several.

In several, each of them sees every batch and holds the same values. So nothing is averaged or
summed over them: to a metric, a logger or a user's ``all_gather`` they are one.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_gpipe.core.run import Engine
from lightning_gpipe.processes.batches import shared
from lightning_gpipe.processes.gathering import whole_optimizer_state, whole_state
from lightning_gpipe.processes.gradients import Together
from lightning_gpipe.processes.launching import Launched


class OverProcesses(Launched):
    """A strategy of one Trainer, in one process or several."""

    _together: Together | None = None
    _accumulates = False  # whether another backward comes before the optimizer's step

    def watch(self, engine: Engine) -> None:
        """Let waits for a process end if ``engine`` knows that it has failed, or is lost."""
        if self._group is not None:
            self._group.watch(engine)

    def train_together(self, around: Sequence[nn.Parameter]) -> None:
        """Keep the processes the same from now on, until :meth:`train_apart`.

        Args:
            around: The parameters that each process has.
        """
        assert self.lightning_module is not None
        if self._group is not None:
            # What is logged is the same in all processes.
            warnings.filterwarnings(
                "ignore", r"It is recommended to use `self\.log\(.*sync_dist=True"
            )
            self._together = Together(self._group, around, self.precision_plugin)
            for module in self.lightning_module.modules():
                if isinstance(module, Metric):  # it would gather the same values from each
                    module.distributed_available_fn = _alone

    def train_apart(self) -> None:
        """End that."""
        if self._together is not None:
            self._together.release()
            self._together = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._group is not None:
            self.train_apart()  # what it adapted refers to the group
            self._group.leave()
            self._group = None

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._together is not None and not self._accumulates:
            self._together.equalise()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader if self._group is None else shared(dataloader, self._group)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._group is None:
            return super().lightning_module_state_dict()
        return whole_state(self.lightning_module, self._group)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._group is None:
            return state
        return whole_optimizer_state(optimizer, state, self._group)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._group is None else self._group.decide(bool(decision), all=all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._group is not None:
            self._group.meet(f"come to {name or 'a barrier'}")

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._group is None else self._group.broadcast(obj, src)


def _alone() -> bool:
    """Tells a metric that there are no other processes."""
    return False
