"""Parameters that stages of several processes share, in one mini-batch.

One process, the home, has the values, and the optimizer changes them there. The others get these
before their first forward, and send their gradients home after the last backward. A parameter used
around the stages too is at home in every process, and each of them gets the gradients of all
stages. With outputs for the last stage it gets those of its own stages only, since those of the
code around the stages are in some processes only, too.

All gradients are added in the order of the stages, so that sums are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree, divided_like, from_shard, shard_of
from lightning_gpipe.core.layout import Layout, Tie, ties_of
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.schedules import CALLER, Action, Kind
from lightning_gpipe.core.transport import Exchange


class Ties:
    """Sends values and gradients of shared parameters; ``at_last``: outputs are at the end."""

    def __init__(self, layout: Layout, *, at_last: bool) -> None:
        self._ties = [tie for tie in ties_of(layout) if not (at_last and tie.home == CALLER)]
        self._here = layout.stages_here

    @property
    def everywhere(self) -> list[nn.Parameter]:
        return [tie.parameter for tie in self._ties if tie.home == CALLER]

    def values(self, exchange: Exchange) -> Mapping[int, Tensor]:
        """Send the values that are at home here; return those received, by parameters' ids."""
        if not self._ties:
            return {}
        for tie, j, route in self._routes():
            if tie.home in self._here:
                value = FlatTree([shard_of(tie.parameter.detach())])
                exchange.send(Action(Kind.FORWARD, 0, j), value, route)
        values = {}
        for tie, j, route in self._routes():
            if tie.home != CALLER and j in self._here:
                value = exchange.receive(Action(Kind.FORWARD, 0, j), route)
                values[id(tie.parameter)] = from_shard(value.leaves[0], tie.parameter)
        return values

    def gradients(
        self, exchange: Exchange, end: Action, by_stage: Sequence[tuple[int, list[Pair]]]
    ) -> list[Pair]:
        """Send gradients to other homes; return those for here, in the order of the stages."""
        if not self._ties:
            return [pair for _, pairs in by_stage for pair in pairs]
        away = {id(t.parameter) for t in self._ties if t.home == CALLER or t.home not in self._here}
        here = [(j, pair) for j, pairs in by_stage for pair in pairs if id(pair[0]) not in away]
        gradient_of = {(j, id(leaf)): gradient for j, pairs in by_stage for leaf, gradient in pairs}
        for tie, j, route in self._routes():
            if j in self._here:
                gradient = gradient_of.get((j, id(tie.parameter)))
                if gradient is not None:
                    gradient = shard_of(divided_like(gradient, tie.parameter))
                exchange.send(end._replace(j=tie.home), FlatTree([gradient]), route)
        for tie, j, route in self._routes():
            if tie.home == CALLER or tie.home in self._here:
                gradient = exchange.receive(end._replace(j=tie.home), route).leaves[0]
                if gradient is not None:
                    here.append((j, (tie.parameter, from_shard(gradient, tie.parameter))))
        return [pair for _, pair in sorted(here, key=itemgetter(0))]

    def _routes(self) -> Iterator[tuple[Tie, int, Route]]:
        """Yield each tie with each stage that follows its home, and the route between."""
        for k, tie in enumerate(self._ties):
            for j in tie.followers:
                yield tie, j, Route(SkipName(None, f"shared parameter {k}"), tie.home, j)
