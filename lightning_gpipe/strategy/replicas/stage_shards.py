"""The parameters that processes of one stage divide, and those that all of them have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.data import divided_like
from lightning_gpipe.distributed import check_alike, equalise
from lightning_gpipe.strategy.processes import Processes


class StageShards:
    """Keeps the processes of a stage in step around the calls of their divided layers."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._divided: list[nn.Parameter] = []
        self._undivided: dict[str, nn.Parameter] = {}  # until the first backward
        self._handles: list[RemovableHandle] = []  # of hooks on optimizers

    def equalise(self, module: nn.Module) -> None:
        """Give all processes of a stage the same values of undivided tensors."""
        groups = self._processes.groups
        if groups is not None and self._processes.options.tensor_parallel > 1:
            with groups.everyone.waiting_for("the values that the processes of a stage share"):
                equalise(module, groups.stage, shards=False)

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        here = {name: x for name, x in module.named_parameters() if not x.is_meta}
        self._divided = [x for x in here.values() if isinstance(x, DTensor)]
        if self._processes.options.tensor_parallel > 1:
            whole = {name: x for name, x in here.items() if not isinstance(x, DTensor)}
            self._undivided = {name: x for name, x in whole.items() if x.requires_grad}
        if self._divided:
            self._handles = list(chain.from_iterable(map(step_one_by_one, optimizers)))

    def after_backward(self) -> None:
        """Divide gradients as their parameters are; check once that the others are alike."""
        for parameter in self._divided:
            if parameter.grad is not None:
                parameter.grad = divided_like(parameter.grad, parameter)
        undivided, self._undivided = self._undivided, {}
        if undivided and self._processes.groups is not None:
            check_alike(undivided, self._processes.groups.stage)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._divided, self._undivided, self._handles = [], {}, []


def step_one_by_one(optimizer: Optimizer) -> list[RemovableHandle]:
    """Step groups of DTensors and other tensors one by one; return the handles of hooks.

    On GPUs optimizers would step them by functions for lists, which do not mix them. The option is
    as before after a step, since checkpoints have it.
    """
    changed: list[dict[str, Any]] = []

    def begin(*_: Any) -> None:
        for group in optimizer.param_groups:
            chosen = group.get("foreach", True) is not None or group.get("fused")
            if not chosen and len({isinstance(x, DTensor) for x in group["params"]}) > 1:
                group["foreach"] = False
                changed.append(group)

    def end(*_: Any) -> None:
        while changed:
            changed.pop()["foreach"] = None

    pre, post = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
    return [pre, post]
