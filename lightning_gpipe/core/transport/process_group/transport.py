"""Workers in several processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from typing_extensions import override

from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.schedules import Action, Schedule
from lightning_gpipe.core.transport.inline import InlineTransport
from lightning_gpipe.core.transport.interface import Exchange, Label, RankFailed, Task, Transport
from lightning_gpipe.core.transport.local import LocalTransport
from lightning_gpipe.core.transport.process_group.connecting.shared_connections import Connection
from lightning_gpipe.core.transport.process_group.exchange import ProcessGroupExchange


class ProcessGroupTransport(Transport):
    """Runs the workers of this process, and connects them with those of others.

    Args:
        layout: What runs where.
        runner: Runs the workers of this process.
        connection: To the owners of the workers.
        pipeline: The number of the pipeline among those that were connected together.
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
        self._office = connection.office
        self._pipeline = pipeline
        self._number = connection.number(pipeline)

    def start(self) -> None:
        """Receive, and expect heartbeats of the other processes, from now on."""
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
        label = label._replace(pipeline=self._number)
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
        failure = self._office.failure(within)
        return None if failure is None else failure.error(self._connection.ranks, self._layout)

    @override
    def on_lost_wait(self, act: Callable[[], None]) -> None:
        self._office.on_lost_wait(act)

    @override
    def inline(self) -> ProcessGroupTransport:
        return self._inline

    @cached_property
    def _inline(self) -> ProcessGroupTransport:
        if isinstance(self._runner, InlineTransport):
            return self
        runner = self._runner.inline()
        return ProcessGroupTransport(self._layout, runner, self._connection, self._pipeline)

    @override
    def close(self) -> None:
        self._connection.close()
        self._runner.close()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a pipeline over processes cannot be copied or pickled. Copy the model before it "
            "becomes a pipeline, or the model that the pipeline was made of."
        )
