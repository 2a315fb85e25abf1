"""Times of whole micro-batches, compared with the simulation of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from lightning_gpipe.core.plan import Action, Kind, fill_drain
from lightning_gpipe.core.plan.layout import one_each
from lightning_gpipe.core.plan.waves import Passing, waves

Span = tuple[float, float]


def drawn(random: Random, m: int, n: int, recomputed: int) -> list[Passing]:
    """Micro-batches of a few sizes, some of whose costs are 0."""
    kinds = [
        [np.array([float(random.choice([0, 1, 2, 5, 9])) for _ in range(n)]) for _ in range(3)]
        for _ in range(3)
    ]
    return [
        Passing(forward, again if i < recomputed else None, backward)
        for i in range(m)
        for forward, again, backward in [random.choice(kinds)]
    ]


def by_simulation(passings: Sequence[Passing], recomputed: int) -> dict[Action, Span]:
    """What the simulator says: a phase starts when the one before has ended."""
    schedule = fill_drain(len(passings), one_each(len(passings[0].forward)), recomputed=recomputed)

    def cost(action: Action) -> float:
        forward, again, backward = passings[action.i]
        times = {Kind.FORWARD: forward, Kind.RECOMPUTE: again, Kind.BACKWARD: backward}
        of_kind = times[action.kind]
        assert of_kind is not None
        return float(of_kind[action.j])

    found: dict[Action, Span] = {}
    at = 0.0
    for k in range(len(schedule.phases)):
        phase = schedule.phase(k).simulate(cost)
        found |= {a: (at + start, at + start + cost(a)) for a, start in phase.start.items()}
        at += phase.makespan
    return found


def by_waves(passings: Sequence[Passing]) -> dict[Action, Span]:
    return {
        Action(wave.kind, wave.i, j): (float(start), float(end))
        for wave in waves(passings)
        for j, (start, end) in enumerate(zip(wave.start, wave.end, strict=True))
    }


@pytest.mark.parametrize("seed", range(100))
def test_every_action_of_a_drawn_case_has_the_times_of_the_simulation(seed: int) -> None:
    random = Random(seed)
    m, n = random.randint(1, 7), random.randint(1, 6)
    recomputed = random.randint(0, m)
    passings = drawn(random, m, n, recomputed)

    assert by_waves(passings) == by_simulation(passings, recomputed)


def test_equal_micro_batches_take_the_slowest_stage_once_for_each_but_the_first() -> None:
    forward, backward = np.array([1.0, 5.0, 2.0]), np.array([2.0, 7.0, 3.0])

    *_, last = waves([Passing(forward, None, backward)] * 10)

    assert last.end.max() == (1 + 5 + 2) + 9 * 5 + (2 + 7 + 3) + 9 * 7


def test_no_action_of_a_stage_starts_before_the_one_before_has_ended() -> None:
    """Also by a rounding error: memory over time is counted in this order."""
    random = np.random.default_rng(0)
    passings = [Passing(*random.random((3, 8))) for _ in range(50)]
    free = np.zeros(8)
    for wave in waves(passings):
        assert (wave.start >= free).all()
        free = wave.end
