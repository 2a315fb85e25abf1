"""Workers in several processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from typing_extensions import override

from lightning_gpipe.core.plan import Action, Layout, Schedule
from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import (
    Exchange,
    Label,
    RankFailed,
    Task,
    Transport,
)
from lightning_gpipe.core.transport.local import LocalTransport
from lightning_gpipe.core.transport.process_group.exchange import ProcessGroupExchange
from lightning_gpipe.core.transport.process_group.office import Office
from lightning_gpipe.core.transport.process_group.sharing import Connection


class ProcessGroupTransport(Transport):
    """Runs the workers of this process, and connects them with those of others.

    Args:
        layout: What runs where.
        runner: Runs the workers of this process.
        connection: To the owners of the workers.
        pipeline: Which of the pipelines that were connected together it is.
    """

    def __init__(
        self,
        layout: Layout,
        runner: LocalTransport | InlineTransport,
        connection: Connection,
        pipeline: int = 0,
    ) -> None:
        self._layout = layout
        self._runner = runner
        self._connection = connection
        self._pipeline = connection.number(pipeline)

    @property
    def _office(self) -> Office:
        return self._connection.office

    def start(self) -> None:
        """Watch the other processes from now on."""
        self._office.open()

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return self._runner.exclusive()

    @override
    def open(
        self,
        phase: Schedule,
        label: Label | None = None,
        awaited: Collection[Action] | None = None,
    ) -> ProcessGroupExchange:
        copies = self._runner.inline().copies()
        assert label is not None, "processes compare the labels of what they run"
        label = label._replace(pipeline=self._pipeline)
        return ProcessGroupExchange(self._layout, phase, label, awaited, copies, self._connection)

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        assert isinstance(exchange, ProcessGroupExchange)
        assert caller is None, "steps by micro-batch run in one process"
        with exchange.holding():
            self._runner.run(exchange, tasks)

    @property
    @override
    def begun(self) -> int:
        return self._office.begun

    @property
    @override
    def serial(self) -> int:
        return self._office.serial

    @override
    def tell(self, error: BaseException) -> None:
        self._office.tell(error)

    @override
    def failure(self, within: float) -> RankFailed | None:
        found = self._office.failure(within)
        if found is None:
            return None
        return RankFailed(found.text(self._connection.ranks, self._layout))

    @override
    def when_in_vain(self, act: Callable[[], None]) -> None:
        self._office.when_in_vain(act)

    @override
    def inline(self) -> ProcessGroupTransport:
        return self._inline

    @cached_property
    def _inline(self) -> ProcessGroupTransport:
        if isinstance(self._runner, InlineTransport):
            return self
        twin = object.__new__(ProcessGroupTransport)
        twin._layout, twin._connection, twin._pipeline = (
            self._layout,
            self._connection,
            self._pipeline,
        )
        twin._runner = self._runner.inline()
        return twin

    @override
    def close(self) -> None:
        self._connection.close()
        self._runner.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a pipeline over processes cannot be copied or pickled: got one. Copy the model before "
            "it becomes a pipeline, or the one that it was made of."
        )
