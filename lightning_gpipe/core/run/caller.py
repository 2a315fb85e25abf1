"""The caller's end of the pipeline: inputs and outputs of a mini-batch, and their gradients.

Loss terms come from every stage. Values that are needed in the middle of the pipeline go straight
there, and outputs that are made there come straight back::

              micro-batch i                              output of micro-batch i
    caller  --(inputs)---------> stage 0 ... stage n-1 --(gives)-----------------> caller
            --(given routes)---> stage j           j   --(returned routes, terms)->

Values that come back on several ways are joined to one tree, so that the pipeline stays one node in
the caller's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, Term, join, parted, tree_unflatten
from lightning_gpipe.core.programs import Program, Route
from lightning_gpipe.core.run.backward.sums import Gradients
from lightning_gpipe.core.run.stage_borders import handed, term_route
from lightning_gpipe.core.schedules import CALLER, Action, Kind
from lightning_gpipe.core.transport import Exchange

Sent = tuple[Action, FlatTree, Route | None]  # the action that gets it, a value, its route


class Caller:
    """The caller's end of a pipeline, for one mini-batch.

    ``stages`` are those that run between input and output: not all if others follow or come before
    by other calls, whose ends of the pipeline these are then.
    """

    def __init__(
        self, program: Program, stages: range | None = None, *, terms: bool = False
    ) -> None:
        self._n = n = program.n
        self._program = program
        stages = range(n) if stages is None else stages
        self._enters, self._leaves = stages.start == 0, stages.stop == n
        # Whether the first stage takes the inputs as they are, and the last one gives the outputs.
        self._direct = program.first == program.inputs and not program.given
        self._gathers = program.outputs != program.parts[-1].gives
        self._terms = terms
        of_terms = [term_route(j, n) for j in stages] if terms else []
        self._routes = (*program.returned, *of_terms)  # by which outputs come back
        self._structures: dict[int, Any] = {}  # of what came back for micro-batch i, if joined

    def input(self, i: int, x: FlatTree) -> Iterator[Sent]:
        to = Action(Kind.FORWARD, i, 0)
        if self._direct:
            yield to, x.aliased(), None
            return
        value_of = self._by_input(x)
        routes = self._program.given
        ways = [self._program.first, *[route.numbers for route in routes]]
        trees = [join([value_of[number] for number in numbers]) for numbers in ways]
        main, *others = handed(trees, [0, *[route.target for route in routes]])
        if self._enters:
            yield to, main, None
        for route, tree in zip(routes, others, strict=True):
            yield Action(Kind.FORWARD, i, route.target), tree, route

    def output(self, exchange: Exchange, i: int) -> FlatTree:
        end = Action(Kind.FORWARD, i, self._n)
        output = exchange.receive(end) if self._leaves else FlatTree([])
        if not self._routes:
            return output
        joined = join([output, *(exchange.receive(end, route) for route in self._routes)])
        self._structures[i] = joined.spec
        return joined

    def output_gradient(self, i: int, leaves: Gradients) -> Iterator[Sent]:
        to = Action(Kind.BACKWARD, i, self._n - 1)
        if not self._routes:
            yield to, FlatTree(leaves), None
            return
        main, *others = parted(FlatTree(leaves, self._structures[i]), 1 + len(self._routes))
        if self._leaves:
            yield to, FlatTree(main.leaves), None
        for route, tree in zip(self._routes, others, strict=True):
            yield to._replace(j=route.source), FlatTree(tree.leaves), route

    def input_gradient(self, exchange: Exchange, x: FlatTree, i: int) -> Gradients:
        """Receive the gradients of the leaves of micro-batch ``i``; ``x`` has their devices."""
        end = Action(Kind.BACKWARD, i, CALLER)
        main = exchange.receive(end) if self._enters else FlatTree([])
        if self._direct:
            pairs = zip(main.leaves, x.leaves, strict=False)  # none, or one for each leaf
            return [None if leaf is None else leaf.to(device) for leaf, device in pairs]
        devices_of = self._by_input(x)
        gradients_of: dict[int, Gradients] = {
            number: [None] * len(tree.leaves) for number, tree in devices_of.items()
        }
        ways = [(self._program.first, main)]
        ways += [(route.numbers, exchange.receive(end, route)) for route in self._program.given]
        for numbers, gradients in ways:
            leaves = iter(gradients.leaves)
            for number in numbers if gradients.leaves else ():
                sums = gradients_of[number]
                for k, device in enumerate(devices_of[number].leaves):
                    if (gradient := next(leaves)) is not None:
                        moved, before = gradient.to(device), sums[k]
                        sums[k] = moved if before is None else before + moved
        return list(chain.from_iterable(gradients_of.values()))

    def split(self, outputs: Sequence[FlatTree]) -> tuple[list[FlatTree], list[list[Term]]]:
        """Return the outputs alone, and the loss terms of each micro-batch in order of layers."""
        if not self._routes:
            return [self._output(each, ()) for each in outputs], []
        mains, handed_out = [], []
        for output in outputs:
            end = len(self._program.returned)
            main, *others = parted(output, 1 + len(self._routes))
            mains.append(self._output(main, others[:end]))
            handed_out.append([term for tree in others[end:] for term in tree_unflatten(tree)])
        return mains, handed_out if self._terms else []

    def presented(self, output: FlatTree) -> tuple[FlatTree, list[Term]]:
        [main], terms = self.split([output])
        return main, terms[0] if terms else []

    def _by_input(self, x: FlatTree) -> dict[int, FlatTree]:
        numbers = self._program.inputs
        return dict(zip(numbers, parted(x, len(numbers)), strict=True))

    def _output(self, main: FlatTree, returned: Sequence[FlatTree]) -> FlatTree:
        if not self._gathers:
            return main
        gives = self._program.parts[-1].gives
        value_of = dict(zip(gives, parted(main, len(gives)), strict=True)) if gives else {}
        for route, tree in zip(self._program.returned, returned, strict=True):
            value_of |= zip(route.numbers, parted(tree, len(route.numbers)), strict=True)
        return join([value_of[number] for number in self._program.outputs])


def devices_of(x: FlatTree) -> FlatTree:
    """Return the device of each leaf, in its place."""
    leaves, spec = x
    return FlatTree([leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves], spec)
