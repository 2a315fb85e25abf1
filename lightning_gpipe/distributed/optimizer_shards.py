"""Optimizers whose states are divided among replicas, the first stage of ZeRO.

All replicas have the same gradients. Each steps its share of the parameters, for which alone it has
the states, and sends the new values to the others. In the second stage it has a share of the
gradients, too. The optimizer is the user's own: while it steps, parameters of other shares have no
gradient, and an optimizer leaves those out. Source: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_gpipe.distributed.shares import Shares, total

_BUCKET = 2**28  # bytes


class OptimizerShards:
    """Lets each replica step its share of the parameters of some optimizers.

    In ``waiting()`` this process may wait for the others. With ``divides_gradients``, a replica has
    the averages of the gradients of its share only.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        shares: Shares,
        waiting: Callable[[], AbstractContextManager[None]],
        *,
        divides_gradients: bool,
    ) -> None:
        self._shares = shares
        self._waiting = waiting
        self._divides_gradients = divides_gradients
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and gradients, in a step
        self._handles = []
        for optimizer in optimizers:
            self.drop_states(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def drop_states(self, optimizer: Optimizer) -> None:
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

        calls = count()

        def computed() -> Any:
            if next(calls):
                raise RuntimeError(
                    "an optimizer whose states are divided among replicas must call its closure "
                    f"once in a step: got a second call by {type(optimizer).__qualname__}, for "
                    "which the parameters of other replicas have their old values. Write "
                    "sharding='parameters', or sharding=None."
                )
            loss = closure()
            self._hide(optimizer)
            return loss

        if positional:
            return (optimizer, computed, *positional[1:]), kwargs
        return args, {**kwargs, "closure": computed}

    def _hide(self, optimizer: Optimizer) -> None:
        for parameter in self._elsewhere(optimizer):
            if parameter.grad is not None:
                if self._divides_gradients:
                    raise RuntimeError(
                        "divided gradients leave an average in the replica that steps the "
                        "parameter: got a gradient of another's, of shape "
                        f"{tuple(parameter.shape)}, so it is no average. Compute gradients by "
                        "self.manual_backward(loss), not by loss.backward(), and let the "
                        "LightningModule have all parameters of its optimizers."
                    )
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        parameters = self._divided(optimizer)
        if not parameters:
            return
        group, shares = self._shares.group, self._shares
        with self._waiting():
            own = [x.grad is not None and shares.is_own(x) for x in parameters]
            stepped = total(group, own, parameters[0].device)  # each by its owner
            for replica in range(group.size()):
                share = [
                    x.detach()
                    for x, number in zip(parameters, stepped, strict=True)
                    if number and shares.owner_of(x) == replica
                ]
                if share:
                    _broadcast_coalesced(group, share, _BUCKET, replica)

    def _elsewhere(self, optimizer: Optimizer) -> Iterator[Tensor]:
        return (x for x in self._divided(optimizer) if not self._shares.is_own(x))

    def _divided(self, optimizer: Optimizer) -> list[Tensor]:
        parameters = [x for one in optimizer.param_groups for x in one["params"] if not x.is_meta]
        self._shares.add(parameters)
        return [x for x in parameters if not self._shares.keeps(x)]
