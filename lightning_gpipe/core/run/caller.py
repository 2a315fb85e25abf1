"""What the caller of a mini-batch sends to the stages and gets from them, and the gradients.

It sends each micro-batch to the first stage and gets the output of the last one. Loss terms come
from every stage. With a program, values that are needed in the middle of the pipeline go straight
there, and outputs that are made there come straight back::

              micro-batch i                              output of micro-batch i
    caller  --(inputs)---------> stage 0 ... stage n-1 --(gives)-----------------> caller
            --(given routes)---> stage j           j   --(returned routes, terms)->

What comes back on several ways is joined to one tree, so that the pipeline stays one node in the
caller's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, Term, join, parted, requires_grad, tree_unflatten
from lightning_gpipe.core.plan import (
    CALLER,
    Action,
    Kind,
    Program,
    Route,
    Schedule,
    SkipName,
    successor,
)
from lightning_gpipe.core.run.borders import handed
from lightning_gpipe.core.run.gradients import Gradients
from lightning_gpipe.core.transport import Exchange, Twins

Sent = tuple[Action, FlatTree, Route | None]  # what the caller sends, to which action, and how

_TERMS = SkipName(None, "loss terms")


def term_route(j: int, n: int) -> Route:
    """The route of the loss terms of stage ``j`` to the caller, after the last of ``n`` stages."""
    return Route(_TERMS, source=j, target=n)


class Caller:
    """The caller's end of a pipeline, for one mini-batch.

    Args:
        n: The number of stages.
        program: What they run, if that is not their layers.
        terms: Whether to collect loss terms.
        twins: Knows tensors of the batch that are on the first stage's device already.
    """

    def __init__(
        self,
        n: int,
        program: Program | None = None,
        *,
        terms: bool = False,
        twins: Twins | None = None,
    ) -> None:
        self._n = n
        self._twins = twins
        # Programs whose inputs are not what the first stage takes, or outputs not what the last
        # one gives.
        self._spread = self._gathered = program
        if program is not None and program.first == program.inputs and not program.given:
            self._spread = None
        if program is not None and program.outputs == program.parts[-1].gives:
            self._gathered = None
        self._returned = program.returned if program is not None else ()
        self._terms = tuple(term_route(j, n) for j in range(n)) if terms else ()
        self._entering = False  # whether an input requires a gradient
        self._structures: dict[int, Any] = {}  # of what came back for micro-batch i, if joined

    def inputs(self, microbatches: Sequence[FlatTree]) -> Iterator[Sent]:
        """What it sends for a forward."""
        self._entering = any(any(map(requires_grad, x.leaves)) for x in microbatches)
        return chain.from_iterable(self.input(i, x) for i, x in enumerate(microbatches))

    def input(self, i: int, x: FlatTree) -> Iterator[Sent]:
        """What it sends for the forward of micro-batch ``i``."""
        to = Action(Kind.FORWARD, i, 0)
        if self._spread is None:
            yield to, self._near(x).aliased(), None
            return
        value_of = dict(zip(self._spread.inputs, parted(x), strict=True))
        routes = self._spread.given
        ways = [self._spread.first, *[route.numbers for route in routes]]
        trees = [join([value_of[number] for number in numbers]) for numbers in ways]
        main, *others = handed(trees, [0, *[route.target for route in routes]])
        yield to, self._near(main), None
        for route, tree in zip(routes, others, strict=True):
            yield Action(Kind.FORWARD, i, route.target), tree, route

    def _near(self, x: FlatTree) -> FlatTree:
        """What goes to the first stage, with tensors that are there already."""
        if self._twins is None:
            return x
        of = self._twins.of
        near = {id(leaf): of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in x.leaves}
        return FlatTree([near[id(leaf)] for leaf in x.leaves], x.spec)

    def outputs(self, exchange: Exchange, m: int) -> list[FlatTree]:
        """What it gets of a forward: for each micro-batch one tree, joined if there are routes."""
        return [self.output(exchange, i) for i in range(m)]

    def output(self, exchange: Exchange, i: int) -> FlatTree:
        """What it gets of the forward of micro-batch ``i``."""
        end = Action(Kind.FORWARD, i, self._n)
        output = exchange.receive(end)
        routes = (*self._returned, *self._terms)
        if not routes:
            return output
        joined = join([output, *(exchange.receive(end, route) for route in routes)])
        self._structures[i] = joined.spec
        return joined

    def output_gradients(self, gradients: Sequence[Gradients]) -> Iterator[Sent]:
        """What it sends for a backward, given the gradients of the leaves of its outputs."""
        for i, leaves in enumerate(gradients):
            yield from self.output_gradient(i, leaves)

    def output_gradient(self, i: int, leaves: Gradients) -> Iterator[Sent]:
        """What it sends for the backward of micro-batch ``i``."""
        routes = (*self._returned, *self._terms)
        to = Action(Kind.BACKWARD, i, self._n - 1)
        if not routes:
            yield to, FlatTree(leaves), None
            return
        main, *others = parted(FlatTree(leaves, self._structures[i]))
        yield to, FlatTree(main.leaves), None
        for route, tree in zip(routes, others, strict=True):
            yield to._replace(j=route.source), FlatTree(tree.leaves), route

    def awaited(self, phase: Schedule) -> list[Action]:
        """What it waits for in a backward, the last of which ends when everything has ended."""
        own = phase.last_backwards
        return list(map(successor, own if self._entering else own[-1:]))

    def input_gradients(self, exchange: Exchange, inputs: Sequence[FlatTree]) -> list[Gradients]:
        """For each micro-batch, the gradients of its leaves; none if no input requires one.

        Args:
            exchange: What has them.
            inputs: The micro-batches; the device of each leaf in its place.
        """
        if self._entering:
            return [self.input_gradient(exchange, x, i) for i, x in enumerate(inputs)]
        exchange.receive(self.awaited(exchange.phase)[-1])
        return [[] for _ in inputs]

    def input_gradient(self, exchange: Exchange, x: FlatTree, i: int) -> Gradients:
        """The gradients of the leaves of micro-batch ``i``; see :meth:`input_gradients`."""
        end = Action(Kind.BACKWARD, i, CALLER)
        main = exchange.receive(end)
        if self._spread is None:
            return _on_devices(main.leaves, x.leaves)
        devices_of = dict(zip(self._spread.inputs, parted(x), strict=True))
        found: dict[int, Gradients] = {
            number: [None] * len(tree.leaves) for number, tree in devices_of.items()
        }
        ways = [(self._spread.first, main)]
        ways += [(route.numbers, exchange.receive(end, route)) for route in self._spread.given]
        for numbers, gradients in ways:
            leaves = iter(gradients.leaves)
            for number in numbers if gradients.leaves else ():
                sums = found[number]
                for k, device in enumerate(devices_of[number].leaves):
                    if (gradient := next(leaves)) is not None:
                        moved, before = gradient.to(device), sums[k]
                        sums[k] = moved if before is None else before + moved
        return [gradient for gradients in found.values() for gradient in gradients]

    def split(self, outputs: Sequence[FlatTree]) -> tuple[list[FlatTree], list[list[Term]]]:
        """The outputs alone, and for each micro-batch its loss terms, in the order of the layers.

        With a program an output is joined of the values of its outputs, in order.
        """
        if not self._returned and not self._terms:
            return [self._output(each, ()) for each in outputs], []
        mains, handed_out = [], []
        for output in outputs:
            main, *others = parted(output)
            end = len(self._returned)
            mains.append(self._output(main, others[:end]))
            handed_out.append([term for tree in others[end:] for term in tree_unflatten(tree)])
        return mains, handed_out if self._terms else []

    def _output(self, main: FlatTree, returned: Sequence[FlatTree]) -> FlatTree:
        if self._gathered is None:
            return main
        value_of = dict(zip(self._gathered.parts[-1].gives, parted(main), strict=True))
        for route, tree in zip(self._returned, returned, strict=True):
            value_of |= zip(route.numbers, parted(tree), strict=True)
        return join([value_of[number] for number in self._gathered.outputs])


def _on_devices(gradients: Sequence[Tensor | None], devices: Sequence[Any]) -> Gradients:
    devices = devices[: len(gradients)]
    return [
        None if gradient is None else gradient.to(device)
        for gradient, device in zip(gradients, devices, strict=True)
    ]
