"""The rules of every schedule, for all small sizes."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from random import Random
from typing import get_args

import pytest

from lightning_gpipe.core.schedules.action import Action, Kind, successor
from lightning_gpipe.core.schedules.caller_row import with_caller
from lightning_gpipe.core.schedules.placement import folded, looped
from lightning_gpipe.core.schedules.schedule import Schedule
from lightning_gpipe.core.schedules.table import SCHEDULES, AnySchedule, ByMicroBatch, ScheduleKind
from tests.support.blocks import drawn_block

R, B, W = Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHTS


PLACEMENTS = {looped(n, d) for n in range(1, 5) for d in range(1, n + 1) if n % d == 0} | {
    folded(2 * d, d) for d in range(1, 4)
}


BLOCKS = [
    drawn_block(placement, Random(seed), split=split)
    for placement in sorted(PLACEMENTS)
    for split in (False, True)
    for seed in range(2)
]


def small(schedule: AnySchedule) -> Iterator[tuple[Schedule, int, int]]:
    """Yield the schedules of all small sizes, the recomputed micro-batches and the workers."""
    for kind in dict.fromkeys(ScheduleKind.of(schedule, split=split) for split in (False, True)):
        for placement in sorted(PLACEMENTS):
            workers = 1 + max(placement)
            if kind.possible(workers, placement):
                for m in (1, 2, 3, 5):  # short mini-batches too
                    for recomputed in {0, m - 1}:
                        yield kind.build(m, placement, recomputed), recomputed, workers


@pytest.fixture(scope="module", params=[*SCHEDULES, "blocks"])
def every(request: pytest.FixtureRequest) -> list[tuple[Schedule, int, int]]:
    blocks = request.param == "blocks"
    return [
        each for schedule in (BLOCKS if blocks else [request.param]) for each in small(schedule)
    ]


Every = list[tuple[Schedule, int, int]]


def test_no_small_schedule_deadlocks(every: Every) -> None:
    for schedule, _, _ in every:
        assert schedule.simulation.makespan > 0


def test_every_action_runs_exactly_once(every: Every) -> None:
    for schedule, recomputed, _ in every:
        m, n = schedule.m, schedule.n
        ran = [str(action) + f"@{action.j}" for row in schedule.rows for action in row]

        split = any(action.kind is W for row in schedule.rows for action in row)
        kinds = "FBW" if split else "FB"
        all_ = [f"{kind}{i}@{j}" for kind in kinds for i in range(m) for j in range(n)]
        again = [f"R{i}@{j}" for i in range(recomputed) for j in range(n)]
        assert sorted(ran) == sorted(all_ + again)


def test_caller_does_everything_once_if_micro_batches_have_losses(every: Every) -> None:
    for schedule, _, _ in every:
        did = [f"{action}@{action.j}" for action in schedule.caller]

        m, n = schedule.m, schedule.n
        expected = [each for i in range(m) for each in (f"P{i}@-1", f"L{i}@{n}", f"B{i}@-1")]
        assert sorted(did) == (sorted(expected) if len(schedule.phases) == 1 else [])


def test_every_action_belongs_to_the_worker_of_its_stage(every: Every) -> None:
    for schedule, _, workers in every:
        assert len(schedule.rows) == workers
        for w, row in enumerate(schedule.rows):
            assert {schedule.placement[action.j] for action in row} == {w}


def test_no_action_starts_before_what_it_needs_has_ended(every: Every) -> None:
    for schedule, _, _ in every:
        start, end = schedule.simulation.start, schedule.simulation.end

        for action in start:
            needed = [each for each in schedule.needs(action) if each in start]
            assert all(end[each] <= start[action] for each in needed)


def test_interleaved_runs_no_action_before_what_it_needs(every: Every) -> None:
    for schedule, _, _ in every:
        done: set[Action] = set()
        for action in schedule.interleaved:
            assert done.issuperset(set(schedule.needs(action)) & set(schedule.interleaved))
            done.add(action)


def test_interleaved_keeps_the_order_of_each_worker_and_of_the_caller(every: Every) -> None:
    for schedule, _, workers in every:
        for w, row in enumerate((*schedule.rows, schedule.caller)):
            own = [a for a in schedule.interleaved if schedule.worker_of(a) == w]
            assert own == list(row)
        everyone = tuple(range(workers))
        turns = [worker for worker, _ in schedule.turns_of(everyone)]
        assert set(turns) <= {*everyone, workers}
        assert all(one != other for one, other in pairwise(turns))


def test_recompute_comes_right_before_its_backward(every: Every) -> None:
    for schedule, _, _ in every:
        for row in schedule.rows:
            for action, following in pairwise(row):
                if action.kind is R:
                    assert following == Action(B, action.i, action.j)


def test_caller_keeps_no_worker_waiting_whatever_actions_take(every: Every) -> None:
    random = Random(0)
    for schedule in [each for each, _, _ in every if each.caller]:
        alone = Schedule(schedule.m, schedule.placement, schedule.phases)
        drawn = {action: random.choice([0.5, 1.0, 4.0]) for action in alone.interleaved}
        cost = defaultdict(float, drawn).__getitem__  # the caller takes no time

        assert schedule.simulate(cost).start.items() >= alone.simulate(cost).start.items()


def own_schedule(schedule: Schedule, w: int) -> Schedule:
    """That of the process of a worker, if only that of the last stage gets outputs."""
    first, last = (schedule.placement[j] == w for j in (0, -1))
    kinds = {Kind.PREPARE: True, Kind.LOSS: last, Kind.BACKWARD: first}
    return schedule.caller_of(frozenset(kind for kind, here in kinds.items() if here))


def spread(
    schedule: Schedule,
    cost: Callable[[Action], float],
    *,
    meet: bool = False,
    at_last: bool = False,
) -> float:
    """When the last of processes ends that run one worker each, and a caller's row each.

    The caller takes no time. If they ``meet``, each call ends when it has begun in all of them. If
    outputs are ``at_last``, losses are in the process of the last stage only.
    """
    workers = schedule.workers
    own = [own_schedule(schedule, w) if at_last else schedule for w in range(workers)]
    waiting = [
        [action for _, row in reversed(own[w].turns_of((w,))) for action in reversed(row)]
        for w in range(workers)
    ]
    clock, ends = [0.0] * workers, dict[Action, float]()
    called: dict[Action, set[int]] = defaultdict(set)
    progress = True
    while progress:
        progress = False
        for w, queue in enumerate(waiting):
            while queue:
                action = queue[-1]
                called[action].add(w)
                needed = {each for each in schedule.needs(action) if not each.by_caller}
                needed &= set(schedule.interleaved)
                together = meet and action.kind is Kind.PREPARE
                if not needed <= ends.keys() or (together and len(called[action]) < workers):
                    break
                clock[w] = max([clock[w], *(ends[each] for each in needed)])
                if not action.by_caller:
                    ends[action] = clock[w] = clock[w] + cost(action)
                queue.pop()
                progress = True
    assert not any(waiting), "they wait for one another"
    return max(clock)


def test_processes_wait_for_nothing_that_their_worker_does_not_need(every: Every) -> None:
    random = Random(0)
    for schedule in [each for each, _, _ in every if each.caller]:
        alone = Schedule(schedule.m, schedule.placement, schedule.phases)
        drawn = {action: random.choice([0.5, 1.0, 4.0]) for action in alone.interleaved}

        makespan = alone.simulate(drawn.__getitem__).makespan
        for at_last in (False, True):
            assert spread(schedule, drawn.__getitem__, at_last=at_last) == makespan


def test_processes_that_meet_in_calls_end(every: Every) -> None:
    for schedule in [each for each, _, _ in every if each.caller]:
        for at_last in (False, True):
            assert spread(schedule, lambda _: 1.0, meet=True, at_last=at_last) > 0


def test_phase_ends_with_the_last_of_its_results_for_the_caller(every: Every) -> None:
    for schedule, _, _ in every:
        for k in range(len(schedule.phases)):
            phase = schedule.phase(k)
            results = [successor(a) for a in phase.interleaved if not a.by_caller]
            end = phase.last_result
            assert end.j in (-1, phase.n)
            assert end == [each for each in results if (each.kind, each.j) == (end.kind, end.j)][-1]


# Chains of modules, between which the caller's code runs.


@pytest.fixture(scope="module", params=[*get_args(ByMicroBatch), "blocks"])
def chains(request: pytest.FixtureRequest) -> list[tuple[Schedule, Schedule, list[int]]]:
    """The schedules of all small chains, those of their stages as one module, and the cuts."""
    found = []
    for schedule in BLOCKS[::9] if request.param == "blocks" else [request.param]:
        for one, _, _ in small(schedule):
            cuts = range(1, one.n)
            for starts in [each for k in (1, 2) for each in combinations(cuts, k)]:
                alone = Schedule(one.m, one.placement, one.phases)
                found.append((with_caller(alone, (0, *starts)), alone, list(starts)))
    return found


Chains = list[tuple[Schedule, Schedule, list[int]]]


def test_caller_does_everything_once_in_a_chain(chains: Chains) -> None:
    for schedule, _, starts in chains:
        did = [f"{action}@{action.j}" for action in schedule.caller]

        expected = [
            each
            for i in range(schedule.m)
            for each in (
                *(f"P{i}@{j - 1}" for j in (0, *starts)),
                *(f"C{i}@{j - 1}" for j in starts),
                f"L{i}@{schedule.n}",
                f"B{i}@-1",
            )
        ]
        assert sorted(did) == sorted(expected)


def test_caller_keeps_no_worker_of_a_chain_waiting(chains: Chains) -> None:
    """If all actions take a clock cycle; whatever they take, all end."""
    random = Random(0)
    for schedule, alone, _ in chains:
        drawn = {action: random.choice([0.5, 1.0, 4.0]) for action in alone.interleaved}

        assert schedule.simulation.start.items() >= alone.simulation.start.items()
        assert schedule.simulate(defaultdict(float, drawn).__getitem__).makespan > 0


def test_processes_of_a_chain_run_code_before_what_needs_it(chains: Chains) -> None:
    for schedule, _, _ in chains:
        for workers in [*((w,) for w in range(schedule.workers)), tuple(range(schedule.workers))]:
            ran: set[Action] = set()
            for action in [each for _, row in schedule.turns_of(workers) for each in row]:
                assert {each for each in schedule.needs(action) if each in schedule.caller} <= ran
                ran.add(action)


def test_processes_of_a_chain_that_meet_in_calls_end(chains: Chains) -> None:
    for schedule, _, _ in chains:
        assert spread(schedule, lambda _: 1.0, meet=True) > 0
