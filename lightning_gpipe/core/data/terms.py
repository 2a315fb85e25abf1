"""Loss terms that layers hand out beside their output.

A Bayesian layer has a divergence, a mixture of experts a balance of its router: numbers that belong
to the loss but not to the input of the next layer. The usual way is to keep them in an attribute
and add them up in the training step. In a pipeline that fails: the attribute has the value of the
last micro-batch only, and the graph behind it ends inside a stage, where its gradient is lost.

So a layer hands the term out, to whoever collects terms around the call of the layers. In the plain
module the term arrives there as it is. A pipeline sends those of each micro-batch to the caller,
sums or averages them, and sends their gradients back to the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data.microbatch.division import Division

Reduction = Literal["sum", "mean"]


class Term(NamedTuple):
    """A loss term as a layer handed it out."""

    name: str
    value: Tensor
    reduction: Reduction
    weight: float | None


Receiver = Callable[[Term], None]

_receiver: ContextVar[Receiver | None] = ContextVar("lightning_gpipe.loss_terms", default=None)


def loss_term(
    name: str, value: Tensor, *, reduction: Reduction = "sum", weight: float | None = None
) -> None:
    """Hand a loss term out of a layer, to the :class:`collect_loss_terms` around its call.

    Example::

        class Bayesian(nn.Module):
            def forward(self, x):
                weight, divergence = self.sample()
                loss_term("divergence", divergence, reduction="mean")
                return F.linear(x, weight)

    Args:
        name: Its name; terms of one name are added up.
        value: A 0-dim tensor.
        reduction: How a pipeline combines the values of its micro-batches. ``"sum"`` fits a sum
            over rows; ``"mean"`` fits a mean over rows, and what does not depend on the rows. Other
            functions of the whole mini-batch cannot be computed from its micro-batches.
        weight: How much the value counts in a mean, such as its number of tokens; None takes the
            number of rows.

    Raises:
        TypeError: If ``value`` is not a 0-dim tensor.
        ValueError: If ``reduction`` is neither ``"sum"`` nor ``"mean"``.
        RuntimeError: If nobody collects it although gradients are recorded: it would be missing
            from the loss. Without gradients it is dropped.
    """
    if not isinstance(value, Tensor) or value.dim() > 0:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
        raise TypeError(f"the loss term {name!r} must be a 0-dim tensor: got {found}.")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean': got {reduction!r} for {name!r}.")
    receiver = _receiver.get()
    if receiver is not None:
        receiver(Term(name, value, reduction, weight))
    elif torch.is_grad_enabled() and value.requires_grad:
        raise RuntimeError(
            f"the loss term {name!r} must be collected, or it is missing from the loss: call the "
            "layers in `with collect_loss_terms() as terms:`, and add terms[name] to the loss."
        )


class collect_loss_terms:
    """Collects the loss terms that layers hand out in a ``with`` block.

    Example::

        with collect_loss_terms() as terms:
            logits = self.layers(x)
        loss = F.cross_entropy(logits, y) + 0.1 * terms["divergence"]

    The block yields a dict from names to 0-dim tensors, for the whole mini-batch.
    """

    # A class, not a generator: see Note [Context managers are classes].

    def __enter__(self) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        self._receiving = receiving(partial(_add, terms))
        self._receiving.__enter__()
        return terms

    def __exit__(self, *error: object) -> None:
        self._receiving.__exit__(*error)


class receiving:
    """Has ``receiver`` called with each loss term that is handed out in a ``with`` block."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._token: Token[Receiver | None] | None = None

    def __enter__(self) -> None:
        self._token = _receiver.set(self._receiver)

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _receiver.reset(self._token)


def term_receiver() -> Receiver | None:
    """What receives loss terms in the present context, if anything does."""
    return _receiver.get()


def receive_nothing() -> None:
    """Have nobody receive loss terms in the present context."""
    _receiver.set(None)


def reduced(
    microbatches: Sequence[Sequence[Term]], division: Callable[[], Division | None]
) -> Iterable[Term]:
    """The loss terms of a mini-batch.

    Args:
        microbatches: For each micro-batch its terms, in the order of the layers.
        division: Tells how many rows each micro-batch has, if that is known.

    Raises:
        ValueError: If micro-batches differ in their terms, or the number of rows is needed for a
            mean and not known.
    """
    if len({tuple(term[:1] + term[2:3] for term in terms) for terms in microbatches}) > 1:
        found = [[f"{term.name} ({term.reduction})" for term in terms] for terms in microbatches]
        raise ValueError(
            f"layers must hand out the same loss terms for each micro-batch: got {found}."
        )
    for terms in zip(*microbatches, strict=True):
        first = terms[0]
        if first.reduction == "sum":
            yield first._replace(value=sum((term.value for term in terms[1:]), start=first.value))
            continue
        weights = _weights(terms, division)
        total = sum(weights)
        yield first._replace(value=_mean([term.value for term in terms], weights), weight=total)


def _weights(terms: Sequence[Term], division: Callable[[], Division | None]) -> list[float]:
    """How much each micro-batch's term counts in their mean."""
    given = [term.weight for term in terms if term.weight is not None]
    if len(given) == len(terms):
        return given
    known = division()
    if known is None:
        raise ValueError(
            f"the mean of the loss term {terms[0].name!r} needs a weight for each micro-batch: "
            "this MicroBatching does not tell their numbers of rows. Write loss_term(..., "
            "weight=len(x))."
        )
    return list(known.sizes)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of the values that have a weight; the mean of nothing may be NaN."""
    total = sum(weights)
    if total == 0:
        return torch.stack(list(values)).mean()
    shares = [value * (w / total) for value, w in zip(values, weights, strict=True) if w != 0]
    return sum(shares[1:], start=shares[0])


def _add(terms: dict[str, Tensor], term: Term) -> None:
    terms[term.name] = terms[term.name] + term.value if term.name in terms else term.value
