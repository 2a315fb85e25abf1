"""The search for the first value in which two runs differ, and the layers that can be its cause.

Only the values that a pipeline must compute decide whether there is a difference: its output, its
gradients, its buffers and its loss terms. Values between layers may differ, as numbers of rows do;
their floating-point tensors locate a difference. Layers compute in order, so the first whose output
differs is the cause, or one right before it whose output could not be compared. Backward runs in
reverse order, and only its gradients of parameters can be compared::

    layer        0        1     2        3     4
    gradient     differs  none  differs  none  agrees
                                |___________________|  the cause is one of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gpipe.core.verify.compare import Deviation, beyond, same_shapes
from lightning_gpipe.core.verify.named_values import (
    BUFFERS,
    GRADIENTS,
    INPUT_GRADIENTS,
    LOSS,
    LOSS_TERMS,
    OUTPUT,
)
from lightning_gpipe.core.verify.runs import Run
from lightning_gpipe.core.verify.subject import VerifiedProgram

_WORDS = {
    OUTPUT: "the output{}",
    GRADIENTS: "the gradient of {!r}",
    BUFFERS: "the buffer {!r}",
    INPUT_GRADIENTS: "the gradient of the input{}",
    LOSS_TERMS: "the loss term {!r}",
    LOSS: "the loss{}",
}
_NO_MEAN = (
    "it is the sum or mean of those of the micro-batches, and a term that is neither a sum nor a "
    "mean over the rows is another one for the whole batch, as one with the wrong reduction is"
)
_AMPLIFIED = (
    "rounding alone changes it about as much, because the layers amplify it. To find other "
    "differences, call verify() in float64"
)
BY_MICRO_BATCH = "which normalises by micro-batch"


@dataclass(frozen=True)
class Difference:
    """The first value of the pipelined run that differs from that of the plain one.

    Attributes:
        kind: The kind of values, as of :class:`Run`.
        deviation: Its name and by how much it differs.
        layer: The index of the layer (of the stage, unless the model is an nn.Sequential) whose
            output, parameter or buffer it is; None if unknown.
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


# Called with a plain run, another run and perhaps a plain run with rounding errors added: then a
# deviation that is not much larger than the effect of these errors counts as rounding too.
Search = Callable[[Run, Run, Run | None], Difference | None]


def compare(
    plain: Run,
    other: Run,
    rerun: Callable[[bool], Run],
    search: Search,
    repeat_search: Search | None = None,
) -> tuple[Difference | None, Difference | None]:
    """Return the first difference of a run, and the first one between two plain runs.

    Each is None if there is none. More plain runs are made only if there is a difference.

    Args:
        plain, other: A plain run, and the run that is compared with it.
        rerun: Makes another plain run, with rounding errors added if its argument is True.
        search, repeat_search: Find the first difference, the latter between two plain runs.
    """
    difference = search(plain, other, None)
    if difference is None:
        return None, None
    unrepeatable = (repeat_search or search)(plain, rerun(False), None)
    if difference.reason is not None or unrepeatable is not None:
        return difference, unrepeatable
    left = search(plain, other, rerun(True))
    return left or replace(difference, reason=_AMPLIFIED), None


def first_kind(
    tolerance: float, plain: Run, other: Run, perturbed: Run | None
) -> tuple[str, list[Deviation]] | None:
    """Return the first kind of values that deviate by more than rounding, and their deviations."""
    for kind, values in plain.values.items():
        amplified = None if perturbed is None else perturbed.values[kind]
        if deviations := beyond(values, other.values[kind], tolerance, amplified):
            return kind, deviations
    return None


def first_unit(
    tolerance: float, plain: Run, other: Run, perturbed: Run | None
) -> tuple[range, Deviation | None]:
    """Return the first unit whose output deviates by more than rounding, with its deviation.

    Before it come the units after the last one that agrees. If no output deviates, all units after
    that are returned, and None.
    """
    agreeing = -1
    for k, (values, others) in enumerate(zip(plain.units, other.units, strict=True)):
        if not values or not others or not same_shapes(values, others):
            continue
        amplified = None if perturbed is None else perturbed.units[k]
        if deviations := beyond(values, others, tolerance, amplified):
            return range(agreeing + 1, k + 1), deviations[0]
        agreeing = k
    return range(agreeing + 1, len(plain.units)), None


def first_difference(
    tolerance: float,
    reason: str | None,
    titles: Sequence[str],
    plain: Run,
    other: Run,
    perturbed: Run | None,
) -> Difference | None:
    """Return the first deviation that is more than rounding, with the unit of an output.

    ``reason`` is the known reason for a difference, ``titles`` are the names of the units.
    """
    differing = first_kind(tolerance, plain, other, perturbed)
    if differing is None:
        return None
    kind, [deviation, *_] = differing
    value = _WORDS[kind].format(deviation.name)
    units, of_unit = first_unit(tolerance, plain, other, perturbed)
    if kind == OUTPUT and of_unit is not None:
        deviation, value = of_unit, f"the output of {titles[units[-1]]}"
    return Difference(kind, deviation, None, range(0), value, reason)


class UnitSearch:
    """Searches for the first difference, and for the units that can be its cause.

    Args:
        subject: The pipeline and the program that have run.
        tolerance: The largest relative deviation that counts as rounding.
    """

    def __init__(self, subject: VerifiedProgram, tolerance: float) -> None:
        self._subject = subject
        self._tolerance = tolerance

    def first(self, plain: Run, other: Run, perturbed: Run | None) -> Difference | None:
        """Return the first deviation that is more than rounding, if there is one."""
        units = range(len(plain.units))
        unverified = units
        if beyond(plain.values[OUTPUT], other.values[OUTPUT], self._tolerance):
            unverified, deviation = first_unit(self._tolerance, plain, other, perturbed)
            if deviation is not None:
                return self._located(plain, OUTPUT, deviation, unverified[-1], unverified)
        differing = first_kind(self._tolerance, plain, other, perturbed)
        if differing is None:
            return None
        kind, deviations = differing
        deviation = deviations[0]
        k: int | None = None
        if kind == OUTPUT:
            # If all units agree, the difference is in tensors that were not compared.
            suspects = unverified or units
            k = units[-1] if len(suspects) == 1 else None
        elif kind == GRADIENTS:
            deviation = deviations[-1]  # the last layer comes first in backward
            k = self._subject.owner_of(deviation.name)
            suspects = range(k, self._next_with_gradient(plain, k) + 1)
        elif kind == BUFFERS:
            k = self._subject.owner_of(deviation.name)
            suspects = range(k, k + 1)
        elif kind == INPUT_GRADIENTS:
            suspects = range(self._next_with_gradient(plain, -1) + 1)
        else:
            owners = plain.term_units.get(deviation.name, units)
            k = owners[0] if len(owners) == 1 else None
            suspects = range(min(owners), max(owners) + 1)
        difference = self._located(plain, kind, deviation, k, suspects)
        if kind == LOSS_TERMS and difference.reason is None:
            return replace(difference, reason=_NO_MEAN)
        return difference

    def first_unrepeated(self, plain: Run, again: Run, perturbed: Run | None) -> Difference | None:
        """Return the first deviation between two plain runs that is more than rounding."""
        difference = self.first(plain, again, perturbed)
        # The first unit that does not repeat, even if later ones, as normalisations, conceal it.
        suspects, deviation = first_unit(self._tolerance, plain, again, perturbed)
        if difference is None or deviation is None:
            return difference
        return self._located(plain, OUTPUT, deviation, suspects[-1], suspects)

    def _located(
        self, plain: Run, kind: str, deviation: Deviation, k: int | None, suspects: range
    ) -> Difference:
        units = self._subject.units
        # A deviation within the tolerance in forward may exceed it in backward.
        reason = self._reason(plain, suspects.stop if kind == OUTPUT else len(units))
        title = "" if k is None else f" of {units[k].title}"
        value = _WORDS[kind].format(deviation.name) + title
        return Difference(kind, deviation, k, suspects, value, reason)

    def _reason(self, plain: Run, end: int) -> str | None:
        """Return the units before ``end`` whose results depend on the micro-batches, and why."""
        reasons = []
        for k, unit in enumerate(self._subject.units[:end]):
            name = f"{self._subject.kind} {k}"
            if norm := next(filter(normalises_by_batch, unit.module.modules()), None):
                reasons.append(f"{name} has a {type(norm).__name__}, {BY_MICRO_BATCH}")
            if k in plain.drew:
                reasons.append(f"{name} draws random numbers, others for each micro-batch")
        if not reasons:
            return None
        return f"{'; '.join(reasons)}. To find other differences, call verify() in eval mode"

    def _next_with_gradient(self, plain: Run, k: int) -> int:
        """Return the first unit after ``k`` with gradients to compare, or the last."""
        gradients = plain.values[GRADIENTS].items()
        owners = (self._subject.owner_of(name) for name, x in gradients if x is not None)
        return min((owner for owner in owners if owner > k), default=len(plain.units) - 1)


def normalises_by_batch(module: nn.Module) -> bool:
    """Return whether a module normalises by the rows it gets, as a batch norm in training does."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
