"""The result of comparing a step on the whole batch with one for each micro-batch, as a message."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from lightning_gpipe.core.run import LOSS_WEIGHT
from lightning_gpipe.core.verify.parity import Parity, Verdict

KINDS = LOSS, GRADIENTS = "loss", "gradients"

_RULE = "the losses of micro-batches must make that of the batch"
_REPEAT = (
    "It depends on what an earlier run left elsewhere than in buffers, attributes and generators, "
    "such as in a global variable, or its operators are not deterministic. Keep such state in a "
    "buffer, or verify without it."
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
    "If it compares the rows of a batch with one another, as contrastive learning does, write "
    "schedule='fill_drain'."
)


@dataclass(frozen=True)
class LossParity(Verdict):
    """Whether the losses of micro-batches make that of the batch, and its gradients.

    Attributes:
        microbatches: The number of micro-batches.
        compared: The deviation of each value: lists by kind, which is "loss" or "gradients".
        tolerance: The largest relative deviation that counts as rounding.
        difference: The first value that deviates by more, or None.
        unrepeatable: The first value that deviates by more between two runs of the step on the
            whole batch, or None. Then nothing can be said about a difference.
        summed: Whether the loss of the batch is the sum of the others.
        weighted: Whether the step says the weight of each loss.
    """

    summed: bool = False
    weighted: bool = False

    @override
    def __str__(self) -> str:
        if self.unrepeatable is not None:
            return (
                "a step must compute the same from the same batch to be verified: between two runs "
                f"of it, {self.unrepeatable.value} {self.unrepeatable.deviation}. {_REPEAT}"
            )
        by = LOSS_WEIGHT if self.weighted else "rows"
        runs = f"a step on the whole batch and one for each of {self.microbatches} micro-batches"
        found = self.difference
        if found is None:
            return f"verified: {runs}, weighted by {by}, agree. {self.extent}"
        said = "verified" if self.explained else _RULE
        end = self._cure if found.reason is None else f"There is a known reason: {found.reason}."
        return (
            f"{said}: between {runs}, weighted by {by}, {found.value} {found.deviation}. {end}\n"
            f"{self.extent}"
        )

    @property
    def _cure(self) -> str:
        if self.summed:
            return _OF_A_SUM
        return (_OF_WEIGHTS if self.weighted else _OF_A_MEAN) + _OF_A_CONTRAST


@dataclass(frozen=True)
class StepParity:
    """Whether a loss for each micro-batch is right for a step; prints as a message.

    Attributes:
        layers: Whether the layers compute in micro-batches what they do on the whole batch.
        loss: Whether the losses of micro-batches make that of the batch.
    """

    layers: tuple[Parity, ...]
    loss: LossParity

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Both, in this order."""
        return *self.layers, self.loss

    def check(self) -> None:
        """Raise if there is a difference that is not explained.

        Raises:
            RuntimeError: Says what differs, where it comes from, and what to do.
        """
        for verdict in self.verdicts:
            verdict.check()

    def __str__(self) -> str:
        return "\n".join(map(str, self.verdicts))
