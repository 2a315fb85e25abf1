"""Exports the schedules for the page that simulates them: ``python -m docs.site.schedules``.

The page moves the actions of a schedule in time, by costs that its reader chooses. Which actions
there are, in which order, and what each of them needs, it gets from here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from lightning_gpipe.core.schedules import SCHEDULES, Action, Kind, Schedule, schedule_for

DEVICES = (2, 3, 4, 6, 8)
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TITLES = {
    "fill_drain": "fill-drain (GPipe)",
    "1f1b": "1F1B",
    "zero_bubble": "zero bubble",
    "zero_bubble_v": "zero bubble, two stages per device",
    "v_half": "V-Half: half the memory of 1F1B",
    "v_min": "V-Min: a third of it",
}


def export() -> dict[str, Any]:
    """Return all schedules of the page, and what an action of each kind needs."""
    schedules: dict[str, Any] = {}
    for (name, each), split, devices, m in product(
        SCHEDULES.items(), (False, True), DEVICES, CHUNKS
    ):
        if each.always_split and not split:
            continue
        placement = (*range(devices), *(reversed(range(devices)) if each.folded else ()))
        for which, recomputed in {"never": 0, "except_last": m - 1, "always": m}.items():
            key = f"{name} {'split' if split else 'whole'} {devices} {m} {which}"
            built = schedule_for(name, m, placement, recomputed=recomputed, split=split)
            schedules[key] = _texts(built)
    return {
        "devices": DEVICES,
        "chunks": CHUNKS,
        "kinds": [
            {
                "name": name,
                "title": TITLES[name],
                "split": split,
                "byMicroBatch": each.by_micro_batch,
            }
            for name, each in SCHEDULES.items()
            for split in ((True,) if each.always_split else (False, True))
        ],
        "needs": {kind.letter: kind.after for kind in Kind},
        "directions": {kind.letter: kind.direction for kind in Kind},
        "schedules": schedules,
    }


def _texts(schedule: Schedule) -> dict[str, Any]:
    """A schedule in brief: an action as its kind and micro-batch, with its stage: ``F0.2``."""
    return {
        "placement": schedule.placement,
        "phases": [[_text(row) for row in rows] for rows in schedule.phases],
        "caller": _text(schedule.caller),
    }


def _text(row: Sequence[Action]) -> str:
    return " ".join(f"{action}.{action.j}" for action in row)


if __name__ == "__main__":
    json.dump(export(), sys.stdout, separators=(",", ":"))
