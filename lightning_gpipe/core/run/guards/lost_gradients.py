"""Gradients that would be lost, because they do not come through the pipeline's output.

A layer may keep a tensor with its graph, in an attribute or by a hook, and the user or a layer may
use it again, for a loss or another micro-batch. Its graph ends in the shadows and the inputs of one
stage, so the parameters, and the stages before, never get a gradient.

Autograd has no list of the graphs that end in a leaf. But such a graph keeps its leaves alive:
leaves that outlive their mini-batch belong to one, and get a hook that raises. A gradient that
arrives earlier is in the leaf. A backward for some leaves only, such as ``torch.autograd.grad``,
goes to none of them: tensors that layers keep are warned of.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_gpipe.core.faithful import Shadows
from lightning_gpipe.core.layout import attributes_in
from lightning_gpipe.core.run.backward.roots import leaves_behind, root_of
from lightning_gpipe.core.run.stage import Stage

_DEEPEST = 4  # containers in containers, in which tensors are searched for
_SECOND = "one backward must go through what layers compute for a micro-batch"
_INSTEAD = "compute it in each forward, or keep it without its graph: value.detach()."


class LostGradients:
    """Watches the leaves of one pass through a stage, which it holds weakly."""

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self._stage = stage
        # Shadows with their parameters, and inputs with None.
        self._leaves: list[tuple[weakref.ref[Tensor], nn.Parameter | None]] = [
            (weakref.ref(shadow), parameter)
            for parameter, shadow in shadows.pairs
            if parameter.requires_grad
        ]

    def watch_inputs(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:  # no comprehension, which is one more call for each micro-batch
            if isinstance(leaf, Tensor):
                self._leaves.append((weakref.ref(leaf), None))

    def check(self) -> None:
        for reference, parameter in self._leaves:
            if (leaf := reference()) is not None and leaf.grad is not None:
                _refuse(self._stage, parameter, leaf)

    def check_graph(self) -> None:
        """Raise RuntimeError if the backward that is running goes to these leaves by itself.

        It may free a graph before the stage's own backward, or need what that has freed.
        """
        for reference, parameter in self._leaves:
            if (leaf := reference()) is not None and leaf.requires_grad and is_written(leaf):
                _refuse(self._stage, parameter, leaf)

    def warn_of_kept(self) -> None:
        leaves = {id(leaf) for reference, _ in self._leaves if (leaf := reference()) is not None}
        if names := _names_of_kept(self._stage, leaves):
            warnings.warn(
                "torch.autograd.grad and backward(inputs=...) do not count what a loss has of "
                f"tensors that layers keep: got {', '.join(names)}. If the loss uses one beside "
                "the pipeline's output, write loss_term(name, value) in the layer, and "
                "collect_loss_terms() around its call, or let the layer return it. If not, keep it "
                "without its graph: value.detach().",
                stacklevel=2,
            )

    def check_shadows(self) -> None:
        for reference, parameter in self._leaves:
            shadow = None if parameter is None else reference()
            if shadow is not None and shadow.grad is not None:
                _refuse(self._stage, parameter, shadow)

    def check_inputs(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                _refuse(self._stage, None, leaf)

    def check_captured(self, captured: Sequence[Tensor]) -> None:
        """Raise RuntimeError if layers captured a leaf, whose gradient would go to the caller."""
        ids = set(map(id, captured))
        for reference, parameter in self._leaves:
            if (leaf := reference()) is not None and id(leaf) in ids:
                _refuse_use(self._stage, parameter, leaf)

    def check_inputs_captured(self, captured: Collection[int]) -> None:
        """Raise RuntimeError if an input is among leaves with these ids, of the caller's code."""
        for reference, parameter in self._leaves if captured else ():
            leaf = None if parameter is not None else reference()
            if leaf is not None and id(leaf) in captured:
                _refuse(self._stage, None, leaf)

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in a leaf which outlives the mini-batch.

        Its hook holds the stage weakly: they would be in a cycle that Python cannot collect.
        """
        self._leaves = [each for each in self._leaves if each[0]() is not None]
        for reference, parameter in self._leaves:
            if (leaf := reference()) is not None and leaf.requires_grad:
                called = _called(self._stage, parameter)
                refuse = partial(_refuse_late, weakref.ref(self._stage), called)
                leaf.register_post_accumulate_grad_hook(refuse)


class UnfinishedMiniBatches:
    """The mini-batches whose backward has not run, held weakly, with their leaves.

    If nothing refers to one any more, a layer that uses a tensor of it would lose the gradient.
    """

    def __init__(self) -> None:
        self._forwards: list[tuple[weakref.ref[Any], Sequence[LostGradients]]] = []

    def add(self, minibatch: object, watches: Sequence[LostGradients]) -> None:
        self._forwards.append((weakref.ref(minibatch), watches))

    def remove(self, minibatch: object) -> None:
        self._forwards = [forward for forward in self._forwards if forward[0]() is not minibatch]

    @property
    def awaited(self) -> bool:
        return any(minibatch() is not None for minibatch, _ in self._forwards)

    def settle(self) -> None:
        """Let gradients raise that arrive in mini-batches that are gone, or have arrived there."""
        if not self._forwards:
            return
        latest = self._forwards[-1]
        gone = [forward for forward in self._forwards if forward[0]() is None]
        self._forwards = [forward for forward in self._forwards[:-1] if forward[0]() is not None]
        for watch in _watches(gone):
            watch.refuse_gradients()
        alive = [] if latest[0]() is None else [latest]
        for watch in _watches([*gone, *alive]):
            watch.check()
        self._forwards += alive

    def check_captured(self, captured: Sequence[Tensor]) -> None:
        """Raise RuntimeError if layers of a further mini-batch captured leaves of one of these."""
        for watch in _watches(self._forwards) if captured else ():
            watch.check_captured(captured)


def _watches(
    forwards: Iterable[tuple[weakref.ref[Any], Sequence[LostGradients]]],
) -> Iterator[LostGradients]:
    return chain.from_iterable(watches for _, watches in forwards)


def refuse_second_backward(error: RuntimeError) -> None:
    """Raise an error that explains autograd's about a second backward through a freed graph."""
    if "a second time" in str(error) and not str(error).startswith(_SECOND):
        raise RuntimeError(
            f"{_SECOND}: autograd would go through it a second time. If a tensor that a layer has "
            "kept aside, in an attribute or through a hook, is in the loss beside the output, let "
            "the layer return it, or hand it out with loss_term(name, value). If a layer uses a "
            "tensor without being given it, which did not require a gradient in the first "
            "mini-batches, pass it with the input, marked by whole(tensor). If a layer keeps a "
            "tensor computed from its parameters for several micro-batches, which it did not in "
            "the first ones, let it compute the tensor in each forward. If the loss itself goes "
            "through backward twice, add the losses up before."
        ) from error


def _refuse(stage: Stage, parameter: nn.Parameter | None, leaf: Tensor) -> NoReturn:
    _refuse_late(weakref.ref(stage), _called(stage, parameter), leaf)


def _refuse_late(stage: weakref.ref[Stage], called: str, leaf: Tensor) -> NoReturn:
    alive = stage()
    kept = "" if alive is None else _kept(alive, leaf)
    raise RuntimeError(
        "a tensor with a graph must be handed out of its layer: got a gradient for "
        f"{called} that does not come through the pipeline's output, so it would be lost.{kept} If "
        "it is a loss term, write loss_term(name, value) in the layer, and collect_loss_terms() "
        f"around its call. If the layer uses it again in a later forward, {_INSTEAD}"
    )


def _refuse_use(stage: Stage, parameter: nn.Parameter | None, leaf: Tensor) -> NoReturn:
    raise RuntimeError(
        "a layer must not use a tensor with a graph that it computed from another micro-batch or "
        f"in another mini-batch: got one computed from {_called(stage, parameter)}, whose gradient "
        f"would be lost.{_kept(stage, leaf)} Instead, {_INSTEAD}"
    )


def _called(stage: Stage, parameter: nn.Parameter | None) -> str:
    of = "the input of" if parameter is None else f"{stage.name_of(parameter)} in"
    return f"{of} {stage}"


def is_written(leaf: Tensor) -> bool:
    """Return True if the backward that is running writes the gradient of a leaf."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # autograd.grad returns it; a sparse one has no view to find its node by
        return False


def _kept(stage: Stage, leaf: Tensor) -> str:
    names = _names_of_kept(stage, {id(leaf)})
    return f" Such tensors are kept in {', '.join(names)}." if names else ""


def _names_of_kept(stage: Stage, leaves: Collection[int]) -> list[str]:
    """Name kept tensors with one of these in their graph, as ``layer 3.attention.cache[0]``."""
    return [
        name
        for title, layer in stage.partition.titled_layers
        for path, value in [*attributes_in(layer), *layer.named_buffers()]
        for name, tensor in _tensors_in(f"{title}.{path}", value)
        if tensor.grad_fn is not None
        and any(id(leaf) in leaves for leaf in leaves_behind([root_of(tensor)]))
    ]


def _tensors_in(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth < _DEEPEST:
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple, deque)):
            items = enumerate(value)
        for key, element in items:
            yield from _tensors_in(f"{name}[{key!r}]", element, depth + 1)
