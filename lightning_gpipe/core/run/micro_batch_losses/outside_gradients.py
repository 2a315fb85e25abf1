"""The gradients of the leaves that the caller's code uses, while it runs for each micro-batch.

Its graphs end in parameters around the stages, in those of layers, as with a penalty on weights,
and in other tensors. The code must meet all of them as they are: with the ``.grad`` of the last
step, and as keys of an optimizer's state. So backward returns their gradients without writing them,
shadows of the leaves gather these, and hooks see the sums only, in the backward of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.faithful import ABSENT, NOTHING, Journal, Manager, has_hooks, leaf_like
from lightning_gpipe.core.run.backward.roots import (
    REENTRANT,
    Root,
    gradients_of,
    graph_behind,
    root_of,
    run_backward,
)
from lightning_gpipe.core.run.backward.sums import Pair


class OutsideGradients:
    """The gradients of one mini-batch that do not come from stages."""

    def __init__(self, modules: Iterable[nn.Module], journal: Journal) -> None:
        journal.reset()  # changes that an interrupted mini-batch left
        self._journal = journal
        self._slots = [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._parameters = list({id(p): p for _, _, p in self._slots}.values())
        self._accumulated = [_state_of(parameter.grad) for parameter in self._parameters]
        self._shadows: dict[int, tuple[Tensor, Tensor]] = {}  # by id, a leaf and its shadow

    def without_hooks(self) -> Manager:
        if not has_hooks(*self._parameters):
            return NOTHING  # most often
        hooked = filter(has_hooks, self._parameters)
        pairs = ((each._backward_hooks, each._post_accumulate_grad_hooks) for each in hooked)
        of_all: Iterable[Any] = filter(None, chain.from_iterable(pairs))
        return self._journal.changed(
            (hooks, key, ABSENT) for hooks in of_all for key in reversed(hooks)
        )

    def undo(self) -> None:
        self._journal.undo()

    def backward(
        self,
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
        *,
        ends: Sequence[tuple[Tensor, Any]] = (),
        keep: Callable[[set[Any]], bool] = lambda nodes: False,
    ) -> None:
        """Run backward through the caller's graph of one micro-batch.

        ``ends`` are leaves that backward must reach, each with the node before it. ``keep`` tells
        from the nodes of the graph whether another backward needs it.
        """
        anchors, last_nodes = zip(*ends, strict=True) if ends else ((), ())
        leaves, nodes = graph_behind(roots, until=last_nodes)
        if any(type(node).__name__ == REENTRANT for node in nodes):
            raise RuntimeError(
                "checkpoint() around a pipeline must not be reentrant with a loss for each "
                "micro-batch: got one with use_reentrant=True. Write use_reentrant=False."
            )
        found = gradients_of([*leaves, *anchors], roots, gradients, keep=keep(set(nodes)))
        shadows, sums = [], []
        for leaf, gradient in zip(leaves, found, strict=False):
            if gradient is not None:
                shadows.append(root_of(self._shadow_of(leaf)))
                sums.append(gradient)
        run_backward(shadows, sums)

    def check_slots(self) -> None:
        """Refuse a call of the pipeline while modules have others in the place of parameters."""
        for slots, name, parameter in self._slots:
            other = slots.get(name) if isinstance(slots, dict) else parameter  # not of TorchScript
            if other is parameter or other is None or parameter.is_meta:
                continue  # the code has a value of its own for one of another process
            raise RuntimeError(
                "parameters must stay in their modules while training_step runs for each "
                f"micro-batch: got another {name!r}, of shape {tuple(other.shape)}, at the call of "
                "the pipeline, as torch.func.functional_call puts it there. Write "
                "schedule='fill_drain', for a stage works on other micro-batches before it is put "
                "back."
            )

    def check(self) -> None:
        tensors = *self._parameters, *self.leaves
        if has_hooks(*tensors):
            hooked = next(filter(has_hooks, tensors))
            raise RuntimeError(
                "hooks on gradients must be on parameters of the modules around the pipeline or "
                "in it, and be registered before training_step: got one on a tensor of shape "
                f"{tuple(hooked.shape)}, which would be called for each micro-batch. Register it "
                "on such a parameter in configure_model, or write schedule='fill_drain'."
            )
        for parameter, before in zip(self._parameters, self._accumulated, strict=True):
            if parameter.grad is not None and _state_of(parameter.grad) != before:
                raise RuntimeError(
                    "gradients must come from the loss that training_step returns, with a loss for "
                    f"each micro-batch: a parameter of shape {tuple(parameter.shape)} got one "
                    "before. A layer uses a tensor without being given it, which it did not in "
                    "the first steps, or training_step calls backward: pass the tensor with the "
                    "input, marked by whole(tensor), or write schedule='fill_drain'."
                )

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf, _ in self._shadows.values()]

    def take_gradients(self) -> list[Pair]:
        shadows, self._shadows = self._shadows, {}
        pairs = ((leaf, shadow.grad) for leaf, shadow in shadows.values())
        return [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]

    def _shadow_of(self, leaf: Tensor) -> Tensor:
        if id(leaf) not in self._shadows:
            self._shadows[id(leaf)] = leaf, leaf_like(leaf, requires_grad=True)
        return self._shadows[id(leaf)][1]


def _state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return a value that changes when a gradient is accumulated or replaced."""
    return None if gradient is None else (id(gradient), gradient._version)
