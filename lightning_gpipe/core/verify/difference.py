"""The search for the first value in which two runs differ, and the layers that can be its cause.

Only what a pipeline must compute decides whether there is a difference: output, gradients, buffers
and loss terms. Floating-point tensors between layers locate it. Layers compute in order, so the
first whose output differs is the cause, or one right before it whose output could not be compared.
Backward runs in reverse order, and only its gradients of parameters can be compared::

    layer        0        1     2        3     4
    gradient     differs  none  differs  none  agrees
                                |___________________|  the cause is one of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from typing_extensions import override

from lightning_gpipe.core.verify.compare import Deviation, beyond, deviations, same_shapes
from lightning_gpipe.core.verify.isolation import of_micro_batches
from lightning_gpipe.core.verify.named_values import (
    BUFFERS,
    GRADIENTS,
    INPUT_GRADIENTS,
    LOSS,
    LOSS_TERMS,
    OUTPUT,
)
from lightning_gpipe.core.verify.runs import SOME, Run
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
_OTHERS = "others for each micro-batch"

Rerun = Callable[[bool], Run]  # on the whole batch, with rounding errors added or not


@dataclass(frozen=True)
class Difference:
    """The first value of the pipelined run that differs from that of the plain one."""

    kind: str  # as of Run
    deviation: Deviation  # its name and by how much it differs
    layer: int | None  # whose output, parameter or buffer it is (or the stage); None if unknown
    suspects: range  # the layers of which one is the cause
    value: str  # its description, for a message
    reason: str | None  # why it may differ, and how to find other differences, if known


class Comparison(NamedTuple):
    """The comparison of a run with a plain one."""

    compared: Mapping[str, list[Deviation]]
    tolerance: float  # the largest relative deviation by rounding
    difference: Difference | None  # the first value that deviates by more
    unrepeatable: Difference | None  # the first that does so between two plain runs
    kept: Sequence[str] = ()  # the attributes of layers that differ, by name


@dataclass(eq=False)
class DifferenceSearch:
    """Searches for the first difference between two runs, by the ``titles`` of units."""

    tolerance: float
    titles: Sequence[str] = ()
    reason: str | None = None

    def compare(self, plain: Run, other: Run, rerun: Rerun) -> Comparison:
        """Compare a run with a plain one; if they differ, ``rerun`` makes more plain runs."""
        difference, unrepeatable = self.first(plain, other), None
        if difference is not None:
            unrepeatable = self.first_unrepeated(plain, rerun(False))
            if difference.reason is None and unrepeatable is None:
                left = self.first(plain, other, rerun(True))
                difference = left or replace(difference, reason=_AMPLIFIED)
        compared = {
            kind: deviations(values, other.values[kind]) for kind, values in plain.values.items()
        }
        kept = [deviation.name for deviation in beyond(plain.kept, other.kept, self.tolerance)]
        return Comparison(compared, self.tolerance, difference, unrepeatable, kept)

    def first(self, plain: Run, other: Run, perturbed: Run | None = None) -> Difference | None:
        differing = self._kind(plain, other, perturbed)
        if differing is None:
            return None
        kind, [deviation, *_] = differing
        value = _WORDS[kind].format(deviation.name)
        units, of_unit = self._unit(plain, other, perturbed)
        if kind == OUTPUT and of_unit is not None:
            deviation, value = of_unit, f"the output of {self.titles[units[-1]]}"
        return Difference(kind, deviation, None, range(0), value, self.reason)

    def first_unrepeated(self, plain: Run, again: Run) -> Difference | None:
        return self.first(plain, again)

    def _kind(
        self, plain: Run, other: Run, perturbed: Run | None
    ) -> tuple[str, list[Deviation]] | None:
        """Return the first kind of values that deviate by more than rounding, with these."""
        for kind, values in plain.values.items():
            amplified = None if perturbed is None else perturbed.values[kind]
            if differing := beyond(values, other.values[kind], self.tolerance, amplified):
                return kind, differing
        return None

    def _unit(
        self, plain: Run, other: Run, perturbed: Run | None
    ) -> tuple[range, Deviation | None]:
        """Return the first unit whose output deviates, after those since the last that agrees.

        If none deviates, return all units after the last that agrees, and None.
        """
        agreeing = -1
        for k, (values, others) in enumerate(zip(plain.units, other.units, strict=True)):
            if not values or not others or not same_shapes(values, others):
                continue
            amplified = None if perturbed is None else perturbed.units[k]
            if differing := beyond(values, others, self.tolerance, amplified):
                return range(agreeing + 1, k + 1), differing[0]
            agreeing = k
        return range(agreeing + 1, len(plain.units)), None


class UnitSearch(DifferenceSearch):
    """Searches for the first difference, and for the units that can be its cause."""

    def __init__(self, subject: VerifiedProgram, tolerance: float) -> None:
        super().__init__(tolerance, [unit.title for unit in subject.units])
        self._subject = subject

    @override
    def first(self, plain: Run, other: Run, perturbed: Run | None = None) -> Difference | None:
        units = range(len(plain.units))
        unverified = units
        if beyond(plain.values[OUTPUT], other.values[OUTPUT], self.tolerance):
            unverified, deviation = self._unit(plain, other, perturbed)
            if deviation is not None:
                return self._located(plain, OUTPUT, deviation, unverified[-1], unverified)
        differing = self._kind(plain, other, perturbed)
        if differing is None:
            return None
        kind, [deviation, *_] = differing
        k: int | None = None
        if kind == OUTPUT:
            # If all units agree, the difference is in tensors that were not compared.
            suspects = unverified or units
            k = units[-1] if len(suspects) == 1 else None
        elif kind == GRADIENTS:
            deviation = differing[1][-1]  # the last layer comes first in backward
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

    @override
    def first_unrepeated(self, plain: Run, again: Run) -> Difference | None:
        difference = self.first(plain, again)
        # The first unit that does not repeat, even if later ones, as normalisations, conceal it.
        suspects, deviation = self._unit(plain, again, None)
        if difference is None or deviation is None:
            return difference
        return self._located(plain, OUTPUT, deviation, suspects[-1], suspects)

    def _located(
        self, plain: Run, kind: str, deviation: Deviation, k: int | None, suspects: range
    ) -> Difference:
        # A deviation within the tolerance in forward may exceed it in backward.
        reason = self._reason_in(plain, suspects.stop if kind == OUTPUT else len(self.titles))
        title = "" if k is None else f" of {self.titles[k]}"
        value = _WORDS[kind].format(deviation.name) + title
        return Difference(kind, deviation, k, suspects, value, reason)

    def _reason_in(self, plain: Run, end: int) -> str | None:
        """Return the units before ``end`` whose results depend on the micro-batches, and why."""
        reasons = []
        for k, unit in enumerate(self._subject.units[:end]):
            name = f"{self._subject.kind} {k}"
            ways = ((type(x).__name__, of_micro_batches(x)) for x in unit.module.modules())
            if way := next(filter(itemgetter(1), ways), None):
                reasons.append(f"{name} has a {way[0]}, {way[1]}")
            if k in plain.drew:
                reasons.append(f"{name} draws random numbers, {_OTHERS}")
        if SOME in plain.drew:
            reasons.append(f"a {self._subject.kind} draws random numbers, {_OTHERS}")
        if not reasons:
            return None
        return f"{'; '.join(reasons)}. To find other differences, call verify() in eval mode"

    def _next_with_gradient(self, plain: Run, k: int) -> int:
        """Return the first unit after ``k`` with gradients to compare, or the last."""
        gradients = plain.values[GRADIENTS].items()
        owners = (self._subject.owner_of(name) for name, x in gradients if x is not None)
        return min((owner for owner in owners if owner > k), default=len(plain.units) - 1)


def most_exact(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the comparison of the process that locates a difference best, with the values of all.

    Stages before a fault agree and all after it differ: the first has the fewest suspects.
    """
    kinds = list(comparisons[0].compared)

    def order(each: Comparison) -> tuple[bool, bool, int, int]:
        difference = each.difference
        if difference is None:
            return True, True, 0, 0
        explained = difference.reason is not None and each.unrepeatable is None
        return False, explained, kinds.index(difference.kind), len(difference.suspects)

    compared = {
        kind: list({x.name: x for each in comparisons for x in each.compared[kind]}.values())
        for kind in kinds
    }
    kept = sorted({name for each in comparisons for name in each.kept})
    return min(comparisons, key=order)._replace(compared=compared, kept=kept)
