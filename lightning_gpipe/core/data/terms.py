"""Loss terms that layers hand out beside their output.

Models usually keep the divergence of a Bayesian layer, or the balance of a router, in an attribute.
In a pipeline that has the value of the last micro-batch only, and its graph ends inside a stage,
where the gradient is lost. So a layer hands the term to a receiver around the call of the layers. A
pipeline sends the terms of each micro-batch to the caller, sums or averages them, and sends their
gradients back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data.microbatch.microbatching import Division

Reduction = Literal["sum", "mean"]


class Term(NamedTuple):
    """A loss term, with the arguments of :func:`loss_term`."""

    name: str
    value: Tensor
    reduction: Reduction
    weight: float | None


Receiver = Callable[[Term], None]

# Called with each term in the present context, if anything collects terms there.
term_receiver: ContextVar[Receiver | None] = ContextVar("lightning_gpipe.loss_terms", default=None)


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
        name: The name of the term; terms with the same name are added up.
        value: A 0-dim tensor.
        reduction: How a pipeline combines the values of its micro-batches. ``"sum"`` fits a sum
            over rows; ``"mean"`` fits a mean over rows, or a value that does not depend on rows.
            Other functions of the mini-batch cannot be computed from its micro-batches.
        weight: The weight of the value in a mean, such as its number of tokens; None takes the
            number of rows.

    Raises:
        TypeError: If ``value`` is not a 0-dim tensor.
        ValueError: If ``reduction`` is neither ``"sum"`` nor ``"mean"``.
        RuntimeError: If nothing collects it although it requires a gradient: it would be missing
            from the loss. Without gradients it is dropped.
    """
    if not isinstance(value, Tensor) or value.dim() > 0:
        content = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
        raise TypeError(f"the loss term {name!r} must be a 0-dim tensor: got {content}.")
    if reduction not in ("sum", "mean"):
        raise ValueError(f"reduction must be 'sum' or 'mean': got {reduction!r} for {name!r}.")
    receiver = term_receiver.get()
    if receiver is not None:
        receiver(Term(name, value, reduction, weight))
    elif torch.is_grad_enabled() and value.requires_grad:
        raise RuntimeError(
            f"the loss term {name!r} must be collected, or it is missing from the loss: call the "
            "layers in `with collect_loss_terms() as terms:`, and add terms[name] to the loss."
        )


class collect_loss_terms:
    """Collect the loss terms that layers hand out in a ``with`` block.

    Example::

        with collect_loss_terms() as terms:
            logits = self.layers(x)
        loss = F.cross_entropy(logits, y) + 0.1 * terms["divergence"]

    The block yields a dict from names to 0-dim tensors, for the whole mini-batch.
    """

    # A class, not a generator: see Note [Context managers are classes].

    def __enter__(self) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        self._token = term_receiver.set(partial(_add, terms))
        return terms

    def __exit__(self, *error: object) -> None:
        term_receiver.reset(self._token)


class receiving:
    """Call ``receiver`` with each loss term that is handed out in a ``with`` block."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __enter__(self) -> None:
        self._token = term_receiver.set(self._receiver)

    def __exit__(self, *error: object) -> None:
        term_receiver.reset(self._token)


def reduced(
    microbatches: Sequence[Sequence[Term]], division: Callable[[], Division | None]
) -> Iterable[Term]:
    """Yield the loss terms of a mini-batch, from those of each micro-batch.

    A mean without weights needs the ``division``. Raises a ValueError if that is unknown, or if
    micro-batches have different terms.
    """
    if len({tuple(term[:1] + term[2:3] for term in terms) for terms in microbatches}) > 1:
        names = [[f"{term.name} ({term.reduction})" for term in terms] for terms in microbatches]
        raise ValueError(
            f"layers must hand out the same loss terms for each micro-batch: got {names}."
        )
    for terms in zip(*microbatches, strict=True):
        first, values = terms[0], [term.value for term in terms]
        if first.reduction == "sum":
            yield first._replace(value=sum(values[1:], start=values[0]))
        else:
            weights = _weights(terms, division)
            yield first._replace(value=_mean(values, weights), weight=sum(weights))


def refuse_means(terms: Iterable[Term], i: int) -> None:
    """Raise if a term of micro-batch ``i``, beside which there are others, is a mean to add up."""
    for term in terms if i else ():
        if term.reduction == "sum" and has_mean(term.value.grad_fn):
            raise ValueError(
                f"a loss term that is added up over micro-batches must be a sum: got a mean for "
                f"{term.name!r}. Write loss_term({term.name!r}, value, reduction='mean')."
            )


def trained_sums(terms: Iterable[Term]) -> list[Term]:
    """Return those of the terms that are added up and require a gradient, without their graph."""
    sums = (term for term in terms if term.reduction == "sum" and term.value.requires_grad)
    return [term._replace(value=term.value.detach()) for term in sums]


def warn_of_equal_sums(microbatches: Sequence[Sequence[Term]]) -> None:
    """Warn of sums that are the same for all micro-batches, as a function of weights is."""
    for terms in zip(*microbatches, strict=False):
        values = {float(term.value) for term in terms}
        if len(terms) > 1 == len(values) and values != {0.0}:
            warnings.warn(
                f"the loss term {terms[0].name!r} is the same for all micro-batches, and added up "
                "over them. If it is a function of weights alone, write reduction='mean'.",
                stacklevel=2,
            )


def _weights(terms: Sequence[Term], division: Callable[[], Division | None]) -> list[float]:
    weights = [term.weight for term in terms if term.weight is not None]
    if len(weights) == len(terms):
        return weights
    rows = division()
    if rows is None:
        raise ValueError(
            f"the mean of the loss term {terms[0].name!r} needs a weight for each micro-batch: "
            "this MicroBatching does not tell their numbers of rows. Write loss_term(..., "
            "weight=len(x))."
        )
    return list(rows.sizes)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean; values of no rows may be NaN, so values without weight are left out."""
    total = sum(weights)
    if total == 0:
        return torch.stack(list(values)).mean()
    shares = [value * (w / total) for value, w in zip(values, weights, strict=True) if w != 0]
    return sum(shares[1:], start=shares[0])


def _add(terms: dict[str, Tensor], term: Term) -> None:
    terms[term.name] = terms[term.name] + term.value if term.name in terms else term.value


def has_mean(node: Any) -> bool:
    """Return whether the value of a node is a mean, or a sum with one in it."""
    kind = "" if node is None else node.name()
    if kind.startswith("AddBackward"):
        return any(has_mean(source) for source, _ in node.next_functions)
    # As PyTorch's operators know a reduction, 1 is the mean.
    return kind.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
