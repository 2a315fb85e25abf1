"""Gradients that reach a stage by another way than through the pipeline's output.

A layer may keep a tensor aside, in an attribute or through a hook that stores outputs, and the user
may add a loss of it. Its graph ends in the shadows and the inputs of one stage, where a gradient
would be lost: the parameters, and the stages before, never get it.

Autograd has no list of the graphs that end in a leaf. But such a graph keeps its leaves alive:
those that outlive their mini-batch belong to one, and get a hook that raises. A gradient that
arrives earlier is found in the leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Shadows, add_note
from lightning_gpipe.core.run.stage import Stage


class Asides:
    """The leaves of one pass through a stage, held weakly.

    Args:
        stage: The stage.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._inputs: list[weakref.ref[Tensor]] = []
        self._shadows: list[tuple[weakref.ref[Tensor], nn.Parameter]] = []

    def watch_inputs(self, leaves: Iterable[Any]) -> None:
        """Watch those of ``leaves`` that require a gradient."""
        self._inputs += [
            weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad
        ]

    def watch_shadows(self, shadows: Shadows) -> None:
        """Watch the shadows of parameters."""
        self._shadows += [
            (weakref.ref(shadows.shadow_of(parameter)), parameter)
            for parameter in shadows.parameters
        ]

    def check(self) -> None:
        """Raise if a leaf has a gradient before the backward of the pipeline.

        Raises:
            RuntimeError: Names the leaf.
        """
        self.check_shadows()
        if any(map(_has_gradient, self._inputs)):
            _refuse(self._stage, None)

    def check_shadows(self) -> None:
        """Raise if a shadow has a gradient after the backward, which has taken all of them.

        Raises:
            RuntimeError: Names the parameter.
        """
        for shadow, parameter in self._shadows:
            if _has_gradient(shadow):
                _refuse(self._stage, parameter)

    def refuse_gradients(self) -> None:
        """Let a gradient raise that arrives in a leaf that outlives the mini-batch."""
        inputs: list[tuple[weakref.ref[Tensor], nn.Parameter | None]]
        inputs = [(leaf, None) for leaf in self._inputs]
        for reference, parameter in [*inputs, *self._shadows]:
            leaf = reference()
            if leaf is not None:
                refuse = partial(_refuse, self._stage, parameter)
                leaf.register_post_accumulate_grad_hook(refuse)


def explain_second_backward(error: RuntimeError) -> None:
    """Add a note to autograd's error about a second backward through a graph that is freed."""
    if "second time" in str(error):
        add_note(
            error,
            "A tensor that a layer has kept aside, in an attribute or through a hook, shares a "
            "graph with the pipeline's output, and both are in the loss. Let the layer return it "
            "as a part of its output, or hand it out with loss_term(name, value). Or a layer uses "
            "a tensor without being given it, which did not require a gradient in the first "
            "mini-batch: pass it with the input, marked by whole(tensor).",
        )


def _has_gradient(reference: weakref.ref[Tensor]) -> bool:
    leaf = reference()
    return leaf is not None and leaf.grad is not None


def _refuse(stage: Stage, parameter: nn.Parameter | None, *_: Tensor) -> NoReturn:
    leaf = "the input of" if parameter is None else f"{stage.name_of(parameter)} in"
    raise RuntimeError(
        f"a loss term must be handed out of its layer: got a gradient for {leaf} {stage} that did "
        "not come through the pipeline's output, so it would be lost. In the layer write "
        "loss_term(name, value), and collect_loss_terms() around its call."
    )
