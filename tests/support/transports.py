"""Layouts and tasks for tests of transports, and a transport whose other workers the test plays."""

import contextvars
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.layout import Layout, cut, lay_out
from lightning_gpipe.core.programs import Route
from lightning_gpipe.core.schedules import Action, Schedule
from lightning_gpipe.core.transport import Exchange, Label, Task, Transport

CPU = torch.device("cpu")


def layout_of(n: int, devices: Sequence[torch.device]) -> Layout:
    """A layout of ``n`` stages that do nothing."""
    layers = nn.Sequential(*(nn.Identity() for _ in range(n)))
    return lay_out(cut(layers, [1] * n), devices)


class Job(Task):
    """A task that calls a function, whatever its row; for transports that run whole rows."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.row = []
        self.variables = contextvars.copy_context()
        self._function = function

    @override
    def session(self, *, joined: bool = False) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def perform(self, actions: Sequence[Action], *, at_once: bool = False) -> None:
        self._function()

    @override
    def abandon(self) -> None:
        pass


class MockExchange(Exchange):
    """Gives what it was given to give, and keeps what is sent.

    Attributes:
        sent: What was sent, in order: to which action, by which skip connection, and what.
        checks: How often somebody asked whether the run was given up.
    """

    def __init__(self, mail: dict[tuple[Action, Route | None], FlatTree] | None = None) -> None:
        self._mail = mail or {}
        self.sent: list[tuple[Action, Route | None, FlatTree]] = []
        self.checks = 0

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        self.sent.append((to, skip, value))

    @override
    def receive(self, at: Action, skip: Route | None = None) -> FlatTree:
        return self._mail[at, skip]

    @override
    def check(self) -> None:
        self.checks += 1


class MockTransport(Transport):
    """Runs the tasks of each phase one after another, action by action, and records them.

    Attributes:
        phases: The phases that were opened.
        performed: The actions that were performed, in order.
    """

    def __init__(self) -> None:
        self.phases: list[Schedule] = []
        self.performed: list[Action] = []
        self._mail: dict[tuple[Action, Route | None], FlatTree] = {}

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def open(
        self,
        phase: Schedule,
        label: Label | None = None,
        awaited: Collection[Action] | None = None,
    ) -> Exchange:
        self.phases.append(phase)
        exchange = _Delivering(self._mail)
        exchange.phase = phase
        return exchange

    @override
    def run(self, exchange: Exchange, tasks: Sequence[Task], caller: Task | None = None) -> None:
        for action in self.phases[-1].interleaved:
            task = tasks[self.phases[-1].placement[action.j]]
            with task.session():
                task.perform([action])
            self.performed.append(action)

    @override
    def inline(self) -> Transport:
        return self

    @override
    def close(self) -> None:
        pass


class _Delivering(MockExchange):
    """Gives what was sent."""

    @override
    def send(self, to: Action, value: FlatTree, skip: Route | None = None) -> None:
        self._mail[to, skip] = value
