"""The worker alone, against an exchange in which the test plays all others.

Here are also the tests of ``work``.
"""

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten
from lightning_gpipe.core.faithful.thread.context import Context
from lightning_gpipe.core.faithful.thread.streams import Streams
from lightning_gpipe.core.layout import cut
from lightning_gpipe.core.layout.layout import lay_out
from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.run.observe.clocks import HostClock
from lightning_gpipe.core.run.observe.timeline import Timeline
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_pass import StagePass
from lightning_gpipe.core.run.worker import WorkerTask
from lightning_gpipe.core.schedules import Action, Kind, Schedule, fill_drain
from lightning_gpipe.core.skip.declare import with_skips
from lightning_gpipe.core.transport import RunCancelled
from tests.support.stages import CPU, NONE, begin, stage
from tests.support.transports import MockExchange

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
X = torch.tensor([[1.0, -2.0]])


def task_of(
    stage_pass: StagePass,
    exchange: MockExchange,
    *,
    j: int = 0,
    schedule: Schedule | None = None,
    phase: int = 0,
    timeline: Timeline | None = None,
) -> WorkerTask:
    """The task of a worker with one stage."""
    schedule = schedule or fill_drain(1, tuple([1] * j + [0]), recomputed=1)
    exchange.phase = schedule.phase(phase)
    timeline = timeline or Timeline(schedule, [HostClock()])
    passes = {j: stage_pass}
    return WorkerTask(0, CPU, passes, Streams(), exchange, Context.capture([CPU]), timeline)


def perform(task: WorkerTask, *actions: Action) -> None:
    with task.session():
        task.perform(actions)


def test_forward_sends_the_output_to_the_next_stage() -> None:
    exchange = MockExchange({(Action(F, 0, 0), None): tree_flatten(X)})

    perform(task_of(begin(stage(nn.Tanh())), exchange), Action(F, 0, 0))

    [(to, route, value)] = exchange.sent
    assert (to, route) == (Action(F, 0, 1), None)
    torch.testing.assert_close(value.leaves, [torch.tanh(X)])


def test_backward_sends_the_gradient_to_the_stage_before() -> None:
    x = X.clone().requires_grad_()
    exchange = MockExchange(
        {
            (Action(F, 0, 0), None): tree_flatten(x),
            (Action(B, 0, 0), None): FlatTree([torch.ones(1, 2)]),
        }
    )
    task = task_of(begin(stage(nn.Tanh())), exchange)

    perform(task, Action(F, 0, 0), Action(B, 0, 0))

    to, route, value = exchange.sent[-1]
    assert (to, route) == (Action(B, 0, -1), None)
    torch.testing.assert_close(value.leaves, [1 - torch.tanh(X) ** 2])


def test_recompute_sends_nothing() -> None:
    x = X.clone().requires_grad_()
    exchange = MockExchange({(Action(F, 0, 0), None): tree_flatten(x)})
    task = task_of(begin(stage(nn.Tanh()), frozenset({0})), exchange)

    perform(task, Action(F, 0, 0), Action(R, 0, 0))

    assert [to for to, _, _ in exchange.sent] == [Action(F, 0, 1)]


@with_skips(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x + 1, {"x": 2 * x}


@with_skips(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x * skip


ROUTE = Route(SkipName(None, "x"), 0, 2)


def skipping(j: int) -> Stage:
    """Stage 0 or 2 of a pipeline whose first layer stashes what its last one pops."""
    module = nn.Sequential(Stash(), nn.Tanh(), Pop())
    layout = lay_out(cut(module, [1, 1, 1]), [CPU] * 3, [ROUTE])
    return Stage(layout, j, deferred_batch_norm=True)


def test_skip_goes_straight_to_the_stage_that_pops_it() -> None:
    exchange = MockExchange({(Action(F, 0, 0), None): tree_flatten(X)})

    perform(task_of(begin(skipping(0)), exchange), Action(F, 0, 0))

    assert [(to, route) for to, route, _ in exchange.sent] == [
        (Action(F, 0, 2), ROUTE),
        (Action(F, 0, 1), None),
    ]


def test_gradient_of_a_skip_goes_straight_back() -> None:
    x, skip = X.clone().requires_grad_(), (2 * X).requires_grad_()
    exchange = MockExchange(
        {
            (Action(F, 0, 2), None): tree_flatten(x),
            (Action(F, 0, 2), ROUTE): tree_flatten(skip),
            (Action(B, 0, 2), None): FlatTree([torch.ones(1, 2)]),
        }
    )
    task = task_of(begin(skipping(2)), exchange, j=2)

    perform(task, Action(F, 0, 2), Action(B, 0, 2))

    sent = {(to, route): value.leaves for to, route, value in exchange.sent[1:]}
    torch.testing.assert_close(sent[Action(B, 0, 0), ROUTE], [X])
    torch.testing.assert_close(sent[Action(B, 0, 1), None], [2 * X])


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


def test_error_says_where_it_happened() -> None:
    exchange = MockExchange({(Action(F, 1, 0), None): tree_flatten(X)})
    schedule = fill_drain(3, (0,))

    with pytest.raises(KeyError) as error:
        perform(task_of(begin(stage(Faulty())), exchange, schedule=schedule), Action(F, 1, 0))

    assert error.value.__notes__ == [
        "raised in forward of micro-batch 1 of 3 on stage 0 (layer 0, cpu), in layer 0 (Faulty)"
    ]


class GivenUp(MockExchange):
    cancelled = True

    def check(self) -> None:
        raise RunCancelled


def test_worker_stops_where_the_run_was_given_up() -> None:
    exchange = GivenUp({(Action(F, 0, 0), None): tree_flatten(X)})

    with pytest.raises(RunCancelled) as cancelled:
        perform(task_of(begin(stage(nn.Tanh())), exchange), Action(F, 0, 0))

    assert not hasattr(cancelled.value, "__notes__")
    assert exchange.sent == []


def test_shadows_are_in_place_for_the_forwards_of_a_row_only() -> None:
    linear = nn.Linear(2, 2)
    weight = linear.weight
    schedule = fill_drain(1, (0,))
    found = []
    for phase in (0, 1):
        stage_pass = begin(stage(linear), NONE)
        task = task_of(stage_pass, MockExchange(), schedule=schedule, phase=phase)
        with task.session():
            found.append(linear.weight is weight)

    assert found == [False, True]
    assert linear.weight is weight


def test_what_ran_is_recorded() -> None:
    exchange = MockExchange({(Action(F, 0, 0), None): tree_flatten(X)})
    schedule = fill_drain(1, (0,))
    timeline = Timeline(schedule, [HostClock()])
    task = task_of(begin(stage(nn.Tanh())), exchange, schedule=schedule, timeline=timeline)

    perform(task, Action(F, 0, 0))

    [span] = timeline.spans
    assert (span.worker, span.action) == (0, Action(F, 0, 0))
    assert span.start <= span.end
