"""Optimizers whose states are divided among replicas, the first stage of ZeRO.

All replicas have the same gradients, so any of them can step any parameter. Here each steps its
share and sends the new values to the others. An optimizer has a state only for what it steps, so
each replica has a share of the states, too.

The optimizer is the user's own. While it steps, parameters of other shares have no gradient, and an
optimizer leaves those out. Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, _broadcast_coalesced  # type: ignore[attr-defined]
from torch.optim import Optimizer

_BUCKET = 2**28  # bytes


class OptimizerShards:
    """Lets each replica step its share of the parameters of some optimizers.

    Shares are of whole parameters, the largest first, so that they have about as many elements.

    Args:
        optimizers: The same ones in all replicas, whose parameters on meta are left out.
        group: The replicas.
        waiting: A ``with`` block in which this process may wait for the others.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        group: ProcessGroup,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._group = group
        self._waiting = waiting
        self._replica_of: dict[Tensor, int] = {}  # that steps a parameter
        self._sizes = [0] * group.size()  # of the shares, in elements
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and gradients, in a step
        self._handles = []
        for optimizer in optimizers:
            self.drop_states(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def drop_states(self, optimizer: Optimizer) -> None:
        """Drop the states of parameters that other replicas step."""
        for parameter in self._elsewhere(optimizer):
            optimizer.state.pop(parameter, None)

    def release(self) -> None:
        """Let each optimizer step all of its parameters again; the states are still divided."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Hide gradients before a step, or at the end of a closure, which computes them."""
        self._hidden.clear()  # of a step that has raised
        _, *positional = args
        closure = kwargs.get("closure", *positional[:1])
        if closure is None:
            self._hide(optimizer)
            return None

        def computed() -> Any:
            loss = closure()
            self._hide(optimizer)
            return loss

        if positional:
            return (optimizer, computed, *positional[1:]), kwargs
        return args, {**kwargs, "closure": computed}

    def _hide(self, optimizer: Optimizer) -> None:
        for parameter in self._elsewhere(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        """Give back the gradients that were hidden, and send the values that have changed."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        stepped = [x for x in self._divided(optimizer) if x.grad is not None]
        with self._waiting():
            for replica in range(self._group.size()):
                share = [x.detach() for x in stepped if self._replica_of[x] == replica]
                for values in _by_kind(share):
                    _broadcast_coalesced(self._group, values, _BUCKET, replica)

    def _elsewhere(self, optimizer: Optimizer) -> Iterator[Tensor]:
        rank = self._group.rank()
        return (x for x in self._divided(optimizer) if self._replica_of[x] != rank)

    def _divided(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters of an optimizer; new ones are added to the smallest shares."""
        parameters = [x for one in optimizer.param_groups for x in one["params"] if not x.is_meta]
        new = (x for x in parameters if x not in self._replica_of)
        for parameter in sorted(new, key=torch.numel, reverse=True):
            replica = min(range(len(self._sizes)), key=self._sizes.__getitem__)
            self._replica_of[parameter] = replica
            self._sizes[replica] += parameter.numel()
        return parameters


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Return tensors in lists of one dtype and device, which are sent together."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return kinds.values()
