"""A plan with a schedule that is found for its costs: a block, if it is faster than any name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightning_gpipe.core.planner.prediction import Prediction
from lightning_gpipe.core.planner.schedule_search import fastest_schedule
from lightning_gpipe.core.planner.stage_cost import costs_of

_LARGEST = 1024  # actions of one kind: the search simulates each of them, thousands of times
_GAIN = 0.005  # the share of the time that a block must save, which is harder to read than a name


def with_block(plan: Prediction, splits: Collection[bool]) -> Prediction:
    """Return a plan with a block in the place of its schedule, or the plan if that is as fast.

    The block recomputes nothing. Large plans, and plans with more stages than devices, or with
    something on the host, stay as they are.
    """
    settings, rows = plan.settings, max(plan.rows)
    n, m = settings.stages, settings.chunks
    elsewhere = settings.offload_activations or settings.has_visits
    if elsewhere or not n == len(plan.workers) > 1 or n * m > _LARGEST:
        return plan
    costs = {
        split: [
            cost.on(place.speed)
            for cost, place in zip(
                costs_of(plan.profile, settings.balance, rows, split=split),
                plan.places,
                strict=True,
            )
        ]
        for split in splits
    }
    room = [plan.room[device] for device in plan.workers]
    found = fastest_schedule(m, plan.placement, costs, room)
    if found is None or isinstance(found.kind.schedule, str):
        return plan
    block = replace(plan, settings=settings._replace(order=found.kind, recomputed=(0,) * n))
    faster = block.time < (1 - _GAIN) * plan.time
    return block if faster and not any(block.missing) else plan
