"""Gradients that reach a stage by another way than through the pipeline's output.

A layer may keep a tensor aside, in an attribute or through a hook that stores outputs. The user may
add a loss of it, and the layer may use it again, for another micro-batch or mini-batch. Its graph
ends in the shadows and the inputs of one stage, where a gradient would be lost: the parameters, and
the stages before, never get it.

Autograd has no list of the graphs that end in a leaf. But such a graph keeps its leaves alive:
those that outlive their mini-batch belong to one, and get a hook that raises. A gradient that
arrives earlier is found in the leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Shadows, add_note
from lightning_gpipe.core.run.kept_aside import names_of_kept
from lightning_gpipe.core.run.stage import Stage


class Asides:
    """The leaves of one pass through a stage, held weakly.

    Args:
        stage: The stage.
        shadows: The shadows of its parameters.
    """

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self._stage = stage
        self._inputs: list[weakref.ref[Tensor]] = []
        self._shadows = [
            (weakref.ref(shadow), parameter)
            for parameter, shadow in shadows.pairs
            if parameter.requires_grad
        ]

    def watch_inputs(self, leaves: Iterable[Any]) -> None:
        """Watch the inputs of a micro-batch."""
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._inputs.append(weakref.ref(leaf))

    def check(self) -> None:
        """Raise if a leaf has a gradient before the backward of the pipeline.

        Raises:
            RuntimeError: Names the leaf.
        """
        self.check_shadows()
        self.check_inputs([reference() for reference in self._inputs])

    def check_shadows(self) -> None:
        """Raise if a shadow has a gradient after the backward, which has taken all of them.

        Raises:
            RuntimeError: Names the parameter.
        """
        for reference, parameter in self._shadows:
            shadow = reference()
            if shadow is not None and shadow.grad is not None:
                _refuse(self._stage, parameter, shadow)

    def check_inputs(self, leaves: Iterable[Any]) -> None:
        """Raise if one of these inputs has a gradient that nobody will take.

        Raises:
            RuntimeError: Names the stage.
        """
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                _refuse(self._stage, None, leaf)

    def check_captured(self, captured: Sequence[Tensor]) -> None:
        """Raise if a leaf is among those that layers captured, whose gradients go to the caller.

        Raises:
            RuntimeError: Names the leaf.
        """
        ids = set(map(id, captured))
        for reference, parameter in self._all():
            leaf = reference()
            if leaf is not None and id(leaf) in ids:
                _refuse_use(self._stage, parameter, leaf)

    def check_inputs_captured(self, captured: Collection[int]) -> None:
        """Raise if an input is among the leaves with these ids, whose gradients go to the caller.

        Raises:
            RuntimeError: Names the stage.
        """
        for reference in self._inputs if captured else ():
            leaf = reference()
            if leaf is not None and id(leaf) in captured:
                _refuse(self._stage, None, leaf)

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in a leaf that outlives the mini-batch."""
        for reference, parameter in self._all():
            if (leaf := reference()) is not None and leaf.requires_grad:
                refuse = partial(_refuse, self._stage, parameter)
                leaf.register_post_accumulate_grad_hook(refuse)

    def _all(self) -> list[tuple[weakref.ref[Any], nn.Parameter | None]]:
        return [*[(reference, None) for reference in self._inputs], *self._shadows]


class _Forward(NamedTuple):
    """A mini-batch whose backward has not run."""

    minibatch: weakref.ref[Any]
    asides: Sequence[Asides]


class Unfinished:
    """The leaves of the mini-batches of a pipeline whose backward has not run.

    It never will if nothing refers to the mini-batch any more. A layer that uses a tensor of it
    nevertheless would lose the gradient.
    """

    def __init__(self) -> None:
        self._forwards: list[_Forward] = []

    def add(self, minibatch: object, asides: Sequence[Asides]) -> None:
        """Add a mini-batch, after its forward."""
        self._forwards.append(_Forward(weakref.ref(minibatch), asides))

    def remove(self, minibatch: object) -> None:
        """Remove one, before its backward."""
        self._forwards = [each for each in self._forwards if each.minibatch() is not minibatch]

    @property
    def awaited(self) -> bool:
        """Whether the backward of a mini-batch can still run."""
        return any(each.minibatch() is not None for each in self._forwards)

    def settle(self) -> None:
        """Let gradients raise that arrive, or have arrived, in mini-batches that are gone.

        Raises:
            RuntimeError: If one has arrived there, or in the latest mini-batch.
        """
        if not self._forwards:
            return
        forwards, latest = self._forwards, self._forwards[-1]
        gone = [each for each in forwards if each.minibatch() is None]
        self._forwards = [each for each in forwards[:-1] if each.minibatch() is not None]
        for asides in chain.from_iterable(each.asides for each in gone):
            asides.refuse_gradients()
        checked = gone if latest.minibatch() is None else [*gone, latest]
        for asides in chain.from_iterable(each.asides for each in checked):
            asides.check()
        if checked is not gone:
            self._forwards.append(latest)

    def check_captured(self, captured: Sequence[Tensor]) -> None:
        """Raise if layers of a further mini-batch captured leaves of one of these.

        Raises:
            RuntimeError: Names the leaf.
        """
        if captured:
            for asides in chain.from_iterable(each.asides for each in self._forwards):
                asides.check_captured(captured)

    def __reduce__(self) -> tuple[type[Unfinished], tuple[()]]:
        return Unfinished, ()  # a copied pipeline has no mini-batches


def explain_second_backward(error: RuntimeError) -> None:
    """Add a note to autograd's error about a second backward through a graph that is freed."""
    if "second time" in str(error):
        add_note(
            error,
            "A tensor that a layer has kept aside, in an attribute or through a hook, shares a "
            "graph with the pipeline's output, and both are in the loss. Let the layer return it "
            "as a part of its output, or hand it out with loss_term(name, value). Or a layer uses "
            "a tensor without being given it, which did not require a gradient in the first "
            "mini-batch: pass it with the input, marked by whole(tensor). Or a layer computes a "
            "tensor from its parameters, keeps it, and uses it for several micro-batches, which it "
            "did not do in the first ones: let it compute the tensor in each forward.",
        )


def _refuse(stage: Stage, parameter: nn.Parameter | None, leaf: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "a tensor with a graph must be handed out of its layer: got a gradient for "
        f"{_called(stage, parameter)} that does not come through the pipeline's output, so it "
        f"would be lost.{_kept(stage, leaf)} If it is a loss term, write loss_term(name, value) in "
        "the layer, and collect_loss_terms() around its call. If the layer uses it again in a "
        f"later forward, {_INSTEAD}"
    )


def _refuse_use(stage: Stage, parameter: nn.Parameter | None, leaf: Tensor) -> NoReturn:
    raise RuntimeError(
        "a layer must not use a tensor with a graph that it computed from another micro-batch or "
        f"in another mini-batch: got one computed from {_called(stage, parameter)}, whose gradient "
        f"would be lost.{_kept(stage, leaf)} Instead, {_INSTEAD}"
    )


_INSTEAD = "compute it in each forward, or keep it without its graph: value.detach()."


def _called(stage: Stage, parameter: nn.Parameter | None) -> str:
    of = "the input of" if parameter is None else f"{stage.name_of(parameter)} in"
    return f"{of} {stage}"


def _kept(stage: Stage, leaf: Tensor | None) -> str:
    names = [] if leaf is None else names_of_kept(stage, leaf)
    return f" Such tensors are kept in {', '.join(names)}." if names else ""
