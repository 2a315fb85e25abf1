"""The results of comparing runs of one batch, as messages."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from lightning_gpipe.core.run import LOSS_WEIGHT
from lightning_gpipe.core.verify.compare import Deviation
from lightning_gpipe.core.verify.difference import Difference
from lightning_gpipe.core.verify.named_values import BUFFERS, GRADIENTS, INPUT_GRADIENTS, OUTPUT

_BACKWARD = "A backward must treat each row by itself, and not depend on the number of rows."
_CURES = {
    OUTPUT: "A layer must treat each row by itself, whatever rows came before: move what it "
    "computes from several rows, or from their number, out of the nn.Sequential.",
    GRADIENTS: _BACKWARD,
    BUFFERS: "Layers run once per micro-batch: update the buffer outside of the nn.Sequential.",
    INPUT_GRADIENTS: _BACKWARD,
}
_READS_BETWEEN = (
    "The forward reads something between its layers, right before this one, that was another when "
    "it was recorded, such as a global variable. Pass it as an argument, keep it in an attribute "
    "or a buffer of the module, or compute it in a layer."
)
_OF_A_SUM = (
    "It is the sum of theirs, of which the mean is taken: return a mean over rows, as "
    "reduction='mean' does, or write schedule='fill_drain'."
)
_OF_A_MEAN = (
    "If it is a mean over something else than rows, such as the tokens that are no padding, return "
    f"of how many: {{'loss': loss, {LOSS_WEIGHT!r}: number}}. If it is a sum over rows, return "
    "their mean. "
)
_OF_WEIGHTS = f"{LOSS_WEIGHT!r} must be the number of what the loss is a mean over. "
_OF_A_CONTRAST = (
    "If it compares the rows of a batch with one another, as contrastive learning does, or draws "
    "from a generator that it seeds itself, write schedule='fill_drain'."
)
_OF_STATE = (
    "The step changes {}, of which each micro-batch finds what the last one left: if the loss "
    "depends on it, write schedule='fill_drain'. "
)
_KEPT = (
    "a value that a layer keeps in an attribute must be read by that layer only: a mini-batch in "
    "micro-batches leaves another in {}, most often that of the last one. Return it with the "
    "output of the layer, or hand it out by loss_term(), from lightning_gpipe. Nothing is wrong if "
    "nobody reads it; attributes whose names begin with an underscore are not compared."
)
_NAMES = 8
_REPEAT = (
    "The results depend on what an earlier run left elsewhere than in buffers, attributes and "
    "generators, such as in a global variable, or operators are not deterministic. Keep such state "
    "in a buffer, or verify without it."
)


@dataclass(frozen=True)
class Verdict(ABC):
    """The result of comparing two runs of one batch, see :class:`Parity`; prints as a message."""

    microbatches: int
    compared: Mapping[str, list[Deviation]]
    tolerance: float
    difference: Difference | None
    unrepeatable: Difference | None = None
    kept: Sequence[str] = ()

    def warn_of_kept(self) -> None:
        """Warn of values in attributes of layers, which somebody may read."""
        if self.kept:
            warnings.warn(_KEPT.format(", ".join(map(repr, self.kept[:_NAMES]))), stacklevel=2)

    @property
    def explained(self) -> bool:
        """True if there is a difference with a known reason, and plain runs repeat."""
        has_reason = self.difference is not None and self.difference.reason is not None
        return has_reason and self.unrepeatable is None

    @property
    def faulty(self) -> bool:
        """True if there is a difference that is not explained."""
        return self.difference is not None and not self.explained

    @property
    def surely_faulty(self) -> bool:
        """True if there is a difference that is not explained, and plain runs repeat."""
        return self.faulty and self.unrepeatable is None

    def check(self) -> None:
        """Raise RuntimeError with the cause and the cure if there is an unexplained difference."""
        if self.faulty:
            raise RuntimeError(str(self))

    @property
    def extent(self) -> str:
        """The size of the deviations, as a sentence."""
        largest = [
            f"{kind} ({len(deviations)}) {_number(max(d.relative for d in deviations))}"
            for kind, deviations in self.compared.items()
            if deviations
        ]
        allowed = _number(self.tolerance)
        return f"Largest differences, relative: {', '.join(largest)}; allowed: {allowed}"

    @abstractmethod
    def __str__(self) -> str: ...

    def _message(self, subject: str, rule: str, runs: str, cure: str, also: str = "") -> str:
        """Return the message: by the rule, ``runs`` must agree, if those of the subject repeat."""
        if self.difference is None:
            return f"verified: {runs} agree{also}. {self.extent}"
        if self.unrepeatable is not None:
            return (
                f"{subject} must compute the same from the same batch to be verified: between two "
                f"plain runs, {_value(self.unrepeatable)}{_suspects(self.unrepeatable)}{_REPEAT}"
            )
        if self.difference.reason is not None:
            cure = f"There is a known reason: {self.difference.reason}."
        start = "verified" if self.explained else rule
        return f"{start}: between {runs}, {_value(self.difference)}{cure}\n{self.extent}"


@dataclass(frozen=True)
class Parity(Verdict):
    """The result of comparing a pipeline with its layers on the whole batch; prints as a message.

    Attributes:
        microbatches: The number of micro-batches.
        compared: The deviation of each value: lists by kind, which is "output", "gradients",
            "buffers", "input gradients" or "loss terms".
        tolerance: The largest relative deviation that counts as rounding.
        difference: The first value that deviates by more, or None.
        unrepeatable: The first value that deviates by more between two plain runs, or None. Then
            nothing can be said about a difference.
        kept: The attributes of layers that were left with other values.
        of_programs: Whether the pipeline, with mini-batches in one piece, has also been compared
            with the model's own forward; a difference is of that then.
    """

    of_programs: bool = False

    @override
    def __str__(self) -> str:
        if self.of_programs and self.difference is not None:
            return self._message(
                "a forward",
                "what a pipeline runs of a forward must compute what the forward computes",
                "the model's own forward and its pipeline, both on the whole batch",
                _READS_BETWEEN,
            )
        return self._message(
            "the layers of a pipeline",
            "a pipeline must compute what its layers compute on the whole batch",
            f"a plain run and one in {self.microbatches} micro-batches",
            _cure(self.difference),
            ", and with the model's own forward" if self.of_programs else "",
        )


@dataclass(frozen=True)
class LossParity(Verdict):
    """The result of comparing the losses of micro-batches with that of the batch, with gradients.

    Attributes:
        microbatches, compared, tolerance, difference, unrepeatable, kept: As of :class:`Parity`;
            the kinds are "loss" and "gradients".
        summed: Whether the loss of the batch is the sum of the others.
        weighted: Whether the step says the weight of each loss.
        changed: The names of attributes and buffers around the layers that the step changes.
    """

    summed: bool = False
    weighted: bool = False
    changed: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        weights = LOSS_WEIGHT if self.weighted else "rows"
        names = ", ".join(map(repr, self.changed[:_NAMES]))
        state = _OF_STATE.format(names) if names else ""
        cure = (_OF_WEIGHTS if self.weighted else _OF_A_MEAN) + _OF_A_CONTRAST
        return self._message(
            "a step",
            "the losses of micro-batches must make that of the batch",
            f"a step on the whole batch and one for each of {self.microbatches} micro-batches "
            f"(weighted by {weights})",
            state + (_OF_A_SUM if self.summed else cure),
        )


@dataclass(frozen=True)
class StepParity:
    """The results of verifying a step with a loss for each micro-batch; prints as a message.

    Attributes:
        layers: The result for the layers of each pipeline.
        loss: The result for the loss.
    """

    layers: tuple[Parity, ...]
    loss: LossParity

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return *self.layers, self.loss

    def check(self) -> None:
        for verdict in self.verdicts:
            verdict.check()

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))


def _value(difference: Difference) -> str:
    return f"{difference.value} {difference.deviation}. "


def _cure(difference: Difference | None) -> str:
    return _suspects(difference) + _CURES.get(difference.kind, "") if difference else ""


def _suspects(difference: Difference) -> str:
    """Return the layers of which one is the cause, unless the name of the value says it."""
    if len(difference.suspects) < 2:
        return ""
    which = f"layers {difference.suspects[0]}..{difference.suspects[-1]}"
    if difference.kind == OUTPUT and difference.layer is None:
        which += ", whose own outputs could not be compared"
    return f"The cause is in one of the {which}. "


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"
