"""Gradients of parameters, of which each process has only some.

A norm is that of all gradients, and an infinity in any of them skips the step of all. The numbers
are those of one process: a norm is made of the norms of the single parameters, in their order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_gpipe.core.data import shard_of, whole_of
from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.distributed.ddp import gathered
from lightning_gpipe.distributed.group import Group
from lightning_gpipe.distributed.shares import counts


class SameParameters:
    """Keeps the parameters that each process has equal in all of them, while a model trains.

    Gradients are clipped and unscaled by methods that stand in for those of the precision plugin
    and its scaler, as the plugin's class is a key in checkpoints. ``around`` are the parameters
    that each process has. The processes with gradients of different parameters are ``everyone``,
    those with other parameters or shards ``replica``, if not the group's.
    """

    def __init__(
        self,
        group: Group,
        around: Sequence[nn.Parameter],
        plugin: Precision,
        everyone: Group | None = None,
        replica: Group | None = None,
    ) -> None:
        self._group = group
        self._deciding = everyone or replica or group
        self._everyone = everyone or group
        self._around = around
        self._around_ids = {id(parameter) for parameter in around}
        self._plugin = plugin
        self._changes = Journal()
        group.equalise(list(map(shard_of, around)), "parameters around the pipeline")
        self._changes.write([(vars(plugin), "clip_grad_by_norm", self._clip)])
        self._changes.write([(vars(plugin), "clip_grad_by_value", self._clip_by_value)])
        self._divides = everyone is not None
        self._clip_with = clip_grad._clip_grads_with_norm_
        self._changes.write([(vars(clip_grad), "_clip_grads_with_norm_", self._clip_with_own)])
        self._clip_by_total = torch.nn.utils.clip_grads_with_norm_
        for place in (torch.nn.utils, clip_grad):
            self._changes.write([(vars(place), "clip_grads_with_norm_", self._clip_with_total)])
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            self._scaler = plugin.scaler
            self._unscale_here = plugin.scaler._unscale_grads_
            self._changes.write([(vars(plugin.scaler), "_unscale_grads_", self._unscale)])

    def equalise(self) -> None:
        """Give all processes the gradients of the first, the same but for rounding by threads."""
        if not self._around:  # in no process
            return
        gradients = [shard_of(p.grad) for p in self._around if p.grad is not None]
        self._group.equalise(gradients, "gradients of parameters around the pipeline")

    def release(self) -> None:
        self._changes.undo()

    def norms(
        self, parameters: Sequence[nn.Parameter], norm_type: float = 2.0
    ) -> list[float | None]:
        """Return :func:`gradient_norms` of all processes, which have the same order."""
        own = gradient_norms(parameters, norm_type)
        norms = torch.zeros(2, len(own), dtype=torch.float64)  # and 1 if there is a gradient
        for k, (parameter, norm) in enumerate(zip(parameters, own, strict=True)):
            counts_here = self._group.rank == 0 or id(parameter) not in self._around_ids
            if norm is not None and counts_here:
                norms[:, k] = torch.tensor([norm, 1.0], dtype=torch.float64)
        sums = self._everyone.sum(norms).T.tolist()
        return [norm if there else None for norm, there in sums]

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self._plugin.main_params(optimizer))
        dtype = reduce(torch.promote_types, [x.dtype for x in parameters] or [torch.float32])
        norms = [norm for norm in self.norms(parameters) if norm is not None]
        total = torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype))
        self._clip_by_total(_shards(parameters), clip_val, total)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = _shards(self._plugin.main_params(optimizer))
        if any(each.grad is not None for each in parameters):  # PyTorch takes no empty list
            torch.nn.utils.clip_grad_value_(parameters, clip_val)

    def _clip_with_own(self, parameters: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse what ``clip_grad_norm_`` does with a norm of the gradients of this process."""
        self._refuse_some("clip_grad_norm_", parameters)
        self._clip_with(parameters, *args, **kwargs)

    def _clip_with_total(
        self, parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse the norm of the gradients of this process, as ``get_total_norm`` returns it."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        if math.isclose(float(own), float(total_norm), rel_tol=1e-6):
            self._refuse_some("clip_grads_with_norm_", parameters)
        self._clip_by_total(parameters, max_norm, total_norm, *args, **kwargs)

    def _refuse_some(self, function: str, parameters: Sequence[nn.Parameter]) -> None:
        elsewhere = [each.is_meta for each in parameters]
        if (any(elsewhere) and not all(elsewhere)) or self._divides:
            raise RuntimeError(
                "gradients must be clipped by the norm of those of all processes: got "
                f"{function} with {len(elsewhere)} parameters in a process that has "
                f"{sum(each.grad is not None for each in parameters)} of their gradients. Write "
                "Trainer(gradient_clip_val=...), or in its place call "
                "self.clip_gradients(optimizer, gradient_clip_val=...)."
            )

    def _unscale(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        shards = [{"params": _shards(each["params"])} for each in optimizer.param_groups]
        stand_in: Any = SimpleNamespace(param_groups=shards)  # all that is read of an optimizer
        infinite_on = self._unscale_here(stand_in, *args, **kwargs)
        infinite = self._deciding.decide(any(map(bool, infinite_on.values())), all=False)
        if not infinite_on:  # a process may have no parameters
            assert self._scaler._scale is not None, "a loss was scaled"
            device = self._scaler._scale.device
            infinite_on = {device: torch.zeros((), device=device)}
        for flag in infinite_on.values():
            flag.fill_(float(infinite))
        return infinite_on


def gradient_norms(parameters: Sequence[nn.Parameter], norm_type: float) -> list[float | None]:
    """Return the norm of each parameter's gradient here; None where there is none."""
    grads = (parameter.grad for parameter in parameters)
    norms = (None if x is None else torch.linalg.vector_norm(x, norm_type) for x in grads)
    return [None if norm is None else float(whole_of(norm)) for norm in norms]


def check_alike(named: Mapping[str, nn.Parameter], group: ProcessGroup) -> None:
    """Warn of parameters whose gradients differ in processes by more than rounding errors."""
    dense = {name: x for name, x in named.items() if x.grad is None or not x.grad.is_sparse}
    own = [-1.0 if norm is None else norm for norm in gradient_norms([*dense.values()], 2.0)]
    device = next((x.device for x in dense.values()), None)
    if device is None:
        return
    everywhere = torch.stack(gathered(group, counts(group, own, device))).cpu()
    largest, smallest = everywhere.amax(0), everywhere.amin(0)
    differ = (largest - smallest > 0.1 * largest) & (largest > 1e-3 * largest.max())
    names = [name for name, x in zip(dense, differ.tolist(), strict=True) if x]
    if names and group.rank() == 0:
        warnings.warn(
            "a parameter that parallelize_module does not divide must get the same gradient in all "
            f"processes of a stage: got different ones for {', '.join(names)}, so its values will "
            "differ. It may be used on shards of activations: divide it, too, or use it where they "
            "are whole.",
            stacklevel=2,
        )


def _shards(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return leaves with the local shards and gradients of parameters, for PyTorch's functions."""
    leaves = []
    for parameter in parameters:
        leaf = shard_of(parameter)
        if leaf is not parameter and parameter.grad is not None:
            leaf.grad = shard_of(parameter.grad)
        leaves.append(leaf)
    return leaves
