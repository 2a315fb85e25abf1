"""Where two runs diverge: the first value that differs, and the layers that can be its cause.

Only what a pipeline promises decides whether there is a difference: its output, its gradients and
its buffers. Values between layers may differ, as numbers of rows do; their floating-point tensors
are used to find the layer. Layers compute in order, so the first whose output differs is the cause,
or one right before it whose output could not be compared. Backward runs in reverse order, and only
its gradients of parameters can be compared::

    layer        0        1     2        3     4
    gradient     differs  none  differs  none  agrees
                                |___________________|  the cause is one of these
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.verify.compare import Deviation, beyond, same_shapes
from lightning_gpipe.core.verify.programmed import Programmed
from lightning_gpipe.core.verify.runs import Run, Subject
from lightning_gpipe.core.verify.values import (
    BUFFERS,
    GRADIENTS,
    INPUT_GRADIENTS,
    LOSS_TERMS,
    OUTPUT,
    Values,
)

WORDS = {
    OUTPUT: "the output{}",
    GRADIENTS: "the gradient of {!r}",
    BUFFERS: "the buffer {!r}",
    INPUT_GRADIENTS: "the gradient of the input{}",
    LOSS_TERMS: "the loss term {!r}",
}
_NO_MEAN = (
    "it is the sum or mean of those of the micro-batches, and a term that is neither a sum nor a "
    "mean over the rows is another one for the whole batch, as one with the wrong reduction is"
)


@dataclass(frozen=True)
class Difference:
    """The first value of the pipelined run that differs from that of the plain one.

    Attributes:
        kind: "output", "gradients", "buffers", "input gradients" or "loss terms".
        deviation: Its name and by how much it differs.
        layer: The index of the layer whose output, parameter or buffer it is; None if unknown.
        suspects: The indices of the layers of which one is the cause.
        value: Its description, for a message.
        reason: Why it may differ, and how to find other differences; None if there is no known
            reason.
    """

    kind: str
    deviation: Deviation
    layer: int | None
    suspects: range
    value: str
    reason: str | None


def first_difference(
    pipeline: Subject, plain: Run, pipelined: Run, tolerance: float, *, perturbed: Run | None = None
) -> Difference | None:
    """The first deviation that is more than rounding, if there is one.

    Args:
        pipeline: What ran.
        plain: The plain run.
        pipelined: The pipelined run.
        tolerance: The largest relative deviation that counts as rounding.
        perturbed: A plain run with rounding errors added to what the layers return. A deviation
            that is not much larger than their effect counts as rounding too.
    """
    return _Search(pipeline, plain, pipelined, tolerance, perturbed).first()


def not_repeated(pipeline: Subject, plain: Run, again: Run, tolerance: float) -> Difference | None:
    """The first deviation between two plain runs that is more than rounding, if there is one.

    What layers return must be equal too, so the first that is not is found even if later layers, as
    normalisations, conceal it in the output.
    """
    search = _Search(pipeline, plain, again, tolerance, None)
    found = search.first()
    return found and (search.layers()[1] or found)


class _Search:
    """Looks through the values of one kind after the other."""

    def __init__(
        self, pipeline: Subject, plain: Run, pipelined: Run, tolerance: float, perturbed: Run | None
    ) -> None:
        self._plain = plain
        self._pipelined = pipelined
        self._tolerance = tolerance
        self._perturbed = perturbed
        self._pipeline = pipeline
        self._layers = list(pipeline)
        self._names = [name for name, _ in pipeline.named_children()]

    def first(self) -> Difference | None:
        found = self.output() or self.gradients() or self.buffers() or self.input_gradients()
        return found or self.loss_terms()

    def layers(self) -> tuple[int, Difference | None]:
        """The last layer before which all outputs agree, and the first difference of an output."""
        agreeing = -1
        pairs = zip(self._plain.layers, self._pipelined.layers, strict=True)
        for k, (one, other) in enumerate(pairs):
            if not one or not other or not same_shapes(one, other):
                continue
            perturbed = None if self._perturbed is None else self._perturbed.layers[k]
            if differing := self._beyond(one, other, perturbed):
                suspects = range(agreeing + 1, k + 1)
                return agreeing, self._found(OUTPUT, differing[0], k, suspects)
            agreeing = k
        return agreeing, None

    def output(self) -> Difference | None:
        if not self._beyond(self._plain.values[OUTPUT], self._pipelined.values[OUTPUT], None):
            return None
        agreeing, found = self.layers()
        if found is not None:
            return found
        differing = self._beyond_of(OUTPUT)
        if not differing:
            return None
        last = len(self._layers) - 1
        # If the last layer agrees, the difference is in tensors that were not compared.
        suspects = range(agreeing + 1 if agreeing < last else 0, last + 1)
        return self._found(OUTPUT, differing[0], last if len(suspects) == 1 else None, suspects)

    def gradients(self) -> Difference | None:
        differing = self._beyond_of(GRADIENTS)
        if not differing:
            return None
        k = self._owner(differing[-1].name)  # the last layer comes first in backward
        return self._found(GRADIENTS, differing[-1], k, range(k, self._next_with_gradient(k) + 1))

    def buffers(self) -> Difference | None:
        differing = self._beyond_of(BUFFERS)
        if not differing:
            return None
        k = self._owner(differing[0].name)
        return self._found(BUFFERS, differing[0], k, range(k, k + 1))

    def input_gradients(self) -> Difference | None:
        differing = self._beyond_of(INPUT_GRADIENTS)
        if not differing:
            return None
        suspects = range(self._next_with_gradient(-1) + 1)
        return self._found(INPUT_GRADIENTS, differing[0], None, suspects)

    def loss_terms(self) -> Difference | None:
        differing = self._beyond_of(LOSS_TERMS)
        if not differing:
            return None
        owners = self._plain.term_layers.get(differing[0].name, range(len(self._layers)))
        k = owners[0] if len(owners) == 1 else None
        found = self._found(LOSS_TERMS, differing[0], k, range(min(owners), max(owners) + 1))
        return replace(found, reason=found.reason or _NO_MEAN)

    def _beyond_of(self, kind: str) -> list[Deviation]:
        perturbed = None if self._perturbed is None else self._perturbed.values[kind]
        return self._beyond(self._plain.values[kind], self._pipelined.values[kind], perturbed)

    def _beyond(
        self, plain: Values, pipelined: Values, perturbed: Values | None
    ) -> list[Deviation]:
        return beyond(plain, pipelined, self._tolerance, perturbed)

    def _found(self, kind: str, deviation: Deviation, k: int | None, suspects: range) -> Difference:
        value = WORDS[kind].format(deviation.name)
        if k is not None:
            value += f" of {layer_name(self._pipeline, k)}"
        # A deviation within the tolerance in forward may exceed it in backward.
        reason = self._reason(suspects.stop if kind == OUTPUT else len(self._layers))
        return Difference(kind, deviation, k, suspects, value, reason)

    def _reason(self, end: int) -> str | None:
        """The layers before ``end`` whose results depend on the micro-batches, and why."""
        reasons = []
        kind_of = "stage" if isinstance(self._pipeline, Programmed) else "layer"
        for k, layer in enumerate(self._layers[:end]):
            if norm := next(filter(sees_the_batch, layer.modules()), None):
                kind = type(norm).__name__
                reasons.append(f"{kind_of} {k} has a {kind}, which normalises by micro-batch")
            if k in self._plain.drew:
                reasons.append(f"{kind_of} {k} draws random numbers, others for each micro-batch")
        if not reasons:
            return None
        return f"{'; '.join(reasons)}. To find other differences, call verify() in eval mode"

    def _owner(self, name: str) -> int:
        """The layer that has a parameter or buffer of this name."""
        return self._names.index(name.partition(".")[0])

    def _next_with_gradient(self, k: int) -> int:
        """The first layer after ``k`` with gradients to compare, or the last."""
        owners = (
            self._owner(name) for name, x in self._plain.values[GRADIENTS].items() if x is not None
        )
        return min((other for other in owners if other > k), default=len(self._layers) - 1)


def layer_name(pipeline: Subject, k: int) -> str:
    """A layer with its name, class, stage and device, for a message."""
    if isinstance(pipeline, Programmed):
        return pipeline.title(k)
    name, layer = list(pipeline.named_children())[k]
    stage = next(stage for stage in pipeline.stages if k <= stage.partition.last)
    what = f"{name!r}, {type(layer).__name__}"
    return f"layer {k} ({what}, stage {stage.partition.index}, {stage.device})"


def sees_the_batch(module: nn.Module) -> bool:
    """Whether it normalises by the rows that it is given, as a batch norm in training does."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
