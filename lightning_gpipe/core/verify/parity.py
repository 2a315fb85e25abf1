"""The result of comparing a plain run with a pipelined one, as a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from lightning_gpipe.core.verify.compare import Deviation
from lightning_gpipe.core.verify.difference import Difference
from lightning_gpipe.core.verify.values import BUFFERS, GRADIENTS, INPUT_GRADIENTS, OUTPUT

_BACKWARD = "A backward must treat each row by itself, and not depend on the number of rows."
_CURES = {
    OUTPUT: "A layer must treat each row by itself, whatever rows came before: move what it "
    "computes from several rows, or from their number, out of the nn.Sequential.",
    GRADIENTS: _BACKWARD,
    BUFFERS: "Layers run once per micro-batch: update the buffer outside of the nn.Sequential.",
    INPUT_GRADIENTS: _BACKWARD,
}
REPEAT = (
    "The results of a layer depend on what earlier runs left elsewhere than in buffers, attributes "
    "and generators, such as in a global variable, or its operators are not deterministic. Keep "
    "such state in a buffer, or verify without it."
)


@dataclass(frozen=True)
class Verdict(ABC):
    """What was found by comparing two runs of one batch; prints as a message.

    Attributes:
        microbatches: The number of micro-batches.
        compared: The deviation of each value: lists by kind.
        tolerance: The largest relative deviation that counts as rounding.
        difference: The first value that deviates by more, or None.
        unrepeatable: The first value that deviates by more between two plain runs, or None. Then
            nothing can be said about a difference.
    """

    microbatches: int
    compared: Mapping[str, list[Deviation]]
    tolerance: float
    difference: Difference | None
    unrepeatable: Difference | None = None

    @property
    def explained(self) -> bool:
        """Whether there is a difference with a known reason, and plain runs repeat."""
        known = self.difference is not None and self.difference.reason is not None
        return known and self.unrepeatable is None

    def check(self) -> None:
        """Raise if there is a difference that is not explained.

        Raises:
            RuntimeError: Says what differs, where it comes from, and what to do.
        """
        if self.difference is not None and not self.explained:
            raise RuntimeError(str(self))

    @property
    def clean(self) -> bool:
        """Whether there is nothing that a user must know."""
        return self.difference is None

    @property
    def extent(self) -> str:
        """How large the deviations are, as a sentence."""
        found = [
            f"{kind} ({len(each)}) {_number(max(d.relative for d in each))}"
            for kind, each in self.compared.items()
            if each
        ]
        return (
            f"Largest differences, relative: {', '.join(found)}; allowed: {_number(self.tolerance)}"
        )

    @abstractmethod
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Parity(Verdict):
    """Whether a pipeline computed what its layers compute on the whole batch; prints as a message.

    Attributes:
        microbatches: The number of micro-batches.
        compared: The deviation of each value: lists by kind, which is "output", "gradients",
            "buffers", "input gradients" or "loss terms".
        tolerance: The largest relative deviation that counts as rounding.
        difference: The first value that deviates by more, or None.
        unrepeatable: The first value that deviates by more between two plain runs, or None. Then
            nothing can be said about a difference.
        of_programs: Whether it has been compared too, with mini-batches in one piece, with what
            the model's own forward computes; a difference is of that then.
        asides: The attributes in which layers keep loss terms, which miss in the output.
    """

    asides: tuple[str, ...] = ()
    of_programs: bool = False

    @property
    @override
    def clean(self) -> bool:
        return super().clean and not self.asides

    @override
    def __str__(self) -> str:
        runs = f"a plain run and one in {self.microbatches} micro-batches"
        if self.difference is None:
            also = ", and with the model's own forward" if self.of_programs else ""
            said = f"verified: {runs} agree{also}. {self.extent}"
        elif self.of_programs:
            said = _of_programs(self.difference, repeats=self.unrepeatable is None)
        elif self.unrepeatable is not None:
            said = _not_verifiable(self.unrepeatable)
        else:
            found = self.difference
            rule = "a pipeline must compute what its layers compute on the whole batch"
            said = (
                f"{'verified' if self.explained else rule}: between {runs}, {found.value} "
                f"{found.deviation}. {_conclusion(found)}\n{self.extent}"
            )
        return "\n".join([said, *map(_aside, self.asides)])


def _not_verifiable(found: Difference) -> str:
    return (
        "the layers of a pipeline must compute the same from the same batch to be verified: "
        f"between two plain runs, {found.value} {found.deviation}. {_which(found)}{REPEAT}"
    )


def _of_programs(found: Difference, *, repeats: bool) -> str:
    if not repeats:
        return (
            "a forward must compute the same from the same batch to be verified: between two runs "
            f"of it, {found.value} {found.deviation}. {REPEAT}"
        )
    said = (
        "what a pipeline runs of a forward must compute what the forward computes: between the "
        f"model's own forward and its pipeline, both on the whole batch, {found.value} "
        f"{found.deviation}."
    )
    if found.reason is not None:
        return f"verified: {said} There is a known reason: {found.reason}."
    return (
        f"{said} The forward reads something between its layers, right before this one, that was "
        "another when it was recorded, such as a global variable. Pass it as an argument, keep it "
        "in an attribute or a buffer of the module, or compute it in a layer."
    )


def _aside(attribute: str) -> str:
    return (
        f"A loss term must leave its layer: {attribute} has parameters behind it and is not part "
        "of the output. A pipeline has its value of the last micro-batch only, without gradient."
    )


def _conclusion(found: Difference) -> str:
    if found.reason is not None:
        return f"There is a known reason: {found.reason}."
    return f"{_which(found)}{_CURES[found.kind]}"


def _which(found: Difference) -> str:
    """The layers of which one is the cause, if that is not said by the name of the value."""
    if len(found.suspects) == 1:
        return ""
    which = f"The cause is in one of the layers {found.suspects[0]}..{found.suspects[-1]}"
    if found.kind == OUTPUT and found.layer is None:
        which += ", whose own outputs could not be compared"
    return f"{which}. "


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"
