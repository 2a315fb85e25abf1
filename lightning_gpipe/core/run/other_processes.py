"""Messages between the processes of a pipeline outside of the work of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpipe.core.data import tree_flatten, tree_unflatten
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from lightning_gpipe.core.transport import Label, Transport

_ANSWER = SkipName(None, "answer")


class Telling:
    """Tells other processes of an error in a ``with`` block."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._transport.tell(error)


def everywhere(
    transport: Transport, layout: Layout, label: Label, j: int, compute: Callable[[], Any]
) -> Any:
    """Send what ``compute`` returns in the process of stage ``j``, in a phase of its own.

    Like an output of that stage. If ``compute`` raises, the others raise RankFailed.
    """
    to, route = Action(Kind.FORWARD, 0, layout.n), Route(_ANSWER, source=j, target=layout.n)
    with Telling(transport):
        exchange = transport.open(fill_drain(1, layout.placement).phase(0), label)
        if layout.owner_of(j) == layout.rank:
            exchange.send(to, tree_flatten(compute()), route)
        result = tree_unflatten(exchange.receive(to, route))
        exchange.settle()
    return result
