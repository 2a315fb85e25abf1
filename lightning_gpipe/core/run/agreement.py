"""The agreement of the processes that run a mini-batch: on what they run, and on what they draw.

Each phase has a label, which processes compare, and the values of its last micro-batch carry
signals of draws. Every phase ends with a result that all get, so that all have heard the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

from lightning_gpipe.core.data import tree_flatten, tree_unflatten
from lightning_gpipe.core.faithful import LibraryWatch, SharedGenerators
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.programs import Program, Route, SkipName
from lightning_gpipe.core.run.shared_parameters import Ties
from lightning_gpipe.core.schedules import Action, Kind, Schedule
from lightning_gpipe.core.transport import STEP, Exchange, Label, Transport

NO_GENERATORS = SharedGenerators(())


class SharedErrors:
    """Tells other processes of an error in a ``with`` block."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._transport.tell(error)


class Agreement:
    """Opens and ends the phases of one mini-batch, alike in all processes.

    ``at_last``: only the process of the last stage gets the outputs. The shared ``generators`` are
    those of a phase; ``library`` watches the generators of Python and NumPy during forward.
    """

    def __init__(self, layout: Layout, schedule: Schedule, label: Label) -> None:
        at_last = self.at_last = bool(label.at_last)
        self.gets_outputs = not at_last or layout.last_here
        self.gets_gradients = not at_last or layout.first_here
        self.ties = Ties(layout, at_last=at_last)
        self.generators = NO_GENERATORS
        self.library: LibraryWatch | None = None
        self._spread = layout.spread
        self._schedule = schedule
        self._label = label

    def agree(self, program: Program, m: int, flags: bytes, *, grad: bool) -> None:
        """Label the phases by what this process runs; almost surely another label differs."""
        if self._spread:
            self._label = self._label._replace(
                grad=int(grad),
                microbatches=m,
                training=sum(flags) << 32 | zlib.crc32(flags),
                program=program.checksum,
                state=self.generators.number,
            )

    def open(
        self, transport: Transport, phase: int, awaited: Collection[Action] | None = None
    ) -> Exchange:
        label = None
        if self._spread:
            label = self._label._replace(phase=STEP if self._schedule.caller else phase)
        exchange = transport.open(self._schedule.phase(phase), label, awaited)
        exchange.signal(self._signals)
        return exchange

    def tell(self, exchange: Exchange, value: Any) -> None:
        """Tell others of a value, a pytree, if this process gets the outputs and they do not."""
        if self.at_last and self.gets_outputs:
            to, route = self._address
            exchange.send_to_all(to, tree_flatten(value), route)

    def told(self, exchange: Exchange, value: Any) -> Any:
        """Return the ``value`` of the process that gets the outputs, in all processes."""
        if not self.at_last or self.gets_outputs:
            return value
        return tree_unflatten(exchange.receive(*self._address))

    @property
    def _address(self) -> tuple[Action, Route]:
        n = self._schedule.n
        return Action(Kind.FORWARD, 0, n), Route(SkipName(None, "told"), n - 1, n)

    def end(self, exchange: Exchange) -> None:
        exchange.settle()
        self.generators.hear(exchange.heard)
        if self.library is not None:
            self.library.heard |= exchange.heard

    def _signals(self) -> int:
        return self.generators.bits | (0 if self.library is None else self.library.bits)
