"""Loss terms on their way from the stages to the caller, and their gradients on the way back.

To the caller they are further leaves of a micro-batch's output, after those of the last stage, so
that the pipeline stays one node in the caller's graph::

    leaves of micro-batch i | output of the last stage | terms of stage 0 | ... | of stage n-1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_gpipe.core.data import FlatTree, Term, tree_unflatten
from lightning_gpipe.core.plan import Action, Kind, Route, SkipName
from lightning_gpipe.core.transport import Exchange

_NAME = SkipName(None, "loss terms")


def term_route(j: int, n: int) -> Route:
    """The route of the loss terms of stage ``j`` to the caller, after the last of ``n`` stages."""
    return Route(_NAME, source=j, target=n)


class HandedOut:
    """Where the loss terms of one mini-batch are among the leaves of its outputs.

    Args:
        n: The number of stages.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._terms: list[list[FlatTree]] = []  # of micro-batch i on stage j, without tensors

    def received(self, exchange: Exchange, outputs: Sequence[FlatTree]) -> list[FlatTree]:
        """The outputs of the last stage, with the leaves of the terms that ``exchange`` has."""
        self._terms, n = [], self._n
        result = []
        for i, output in enumerate(outputs):
            at = Action(Kind.FORWARD, i, n)
            found = [exchange.receive(at, term_route(j, n)) for j in range(n)]
            self._terms.append([FlatTree([None] * len(tree.leaves), tree.spec) for tree in found])
            leaves = [leaf for tree in found for leaf in tree.leaves]
            result.append(FlatTree([*output.leaves, *leaves], output.spec))
        return result

    def cut(self, i: int, leaves: Sequence[Any]) -> tuple[list[Any], list[FlatTree]]:
        """The leaves of micro-batch ``i``: those of the output, and those of each stage's terms."""
        terms = self._terms[i]
        end = len(leaves) - sum(len(tree.leaves) for tree in terms)
        main, result = list(leaves[:end]), []
        for tree in terms:
            begin, end = end, end + len(tree.leaves)
            result.append(FlatTree(list(leaves[begin:end]), tree.spec))
        return main, result

    def returned(
        self, gradients: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[Action, FlatTree, Route | None]]:
        """What the caller sends to begin backward, given the gradients of all leaves."""
        for i, leaves in enumerate(gradients):
            main, terms = self.cut(i, leaves)
            yield Action(Kind.BACKWARD, i, self._n - 1), FlatTree(main), None
            for j, tree in enumerate(terms):
                yield Action(Kind.BACKWARD, i, j), FlatTree(tree.leaves), term_route(j, self._n)

    def split(self, outputs: Sequence[FlatTree]) -> tuple[list[FlatTree], list[list[Term]]]:
        """The outputs, and for each micro-batch its terms, in the order of the layers."""
        mains, handed_out = [], []
        for i, output in enumerate(outputs):
            main, terms = self.cut(i, output.leaves)
            mains.append(FlatTree(main, output.spec))
            handed_out.append([term for tree in terms for term in tree_unflatten(tree)])
        return mains, handed_out
