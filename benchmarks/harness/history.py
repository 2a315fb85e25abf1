"""Former results: whether a figure got worse by more than it varies within a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.report import RESULTS

_EXACT = 0.02  # by how much a figure without quartiles, such as counted bytes, may differ
_MACHINE = ("processor", "cores", "memory", "GPU")  # its load is no part of it


def latest_before(report: Mapping[str, Any], folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the latest saved report of the same command on such a machine, or None.

    The number of rounds may differ: it says how well a figure is known, not what is measured. One
    that this very run has saved does not count: it has the same figures.
    """
    for path in sorted(folder.glob(f"*-{report['benchmark']}.json"), reverse=True):
        former: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if _subject(former) == _subject(report) and former["targets"] != report["targets"]:
            return former
    return None


def changes(report: Mapping[str, Any], former: Mapping[str, Any]) -> dict[str, tuple[float, bool]]:
    """Return the former figure of each claim that has a bound, and whether it got worse.

    It got worse if the middle halves of both runs have nothing in common, and the later one is
    nearer to the bound, or beyond it.
    """
    before = {target["claim"]: target for target in former["targets"]}
    return {
        target["claim"]: (before[target["claim"]]["found"], _worse(target, before[target["claim"]]))
        for target in report["targets"]
        if target["found"] is not None and before.get(target["claim"], {}).get("found") is not None
    }


def _worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    bound = now["target"] or ""
    (low, high), (former_low, former_high) = _middle(now, before), _middle(before, now)
    larger, smaller = low > former_high, high < former_low
    return ("at most" in bound and larger) or ("at least" in bound and smaller)


def _middle(target: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """The quartiles of a figure; one without varies as the other does, if that has them."""
    found, factors = target["found"], (1 - _EXACT, 1 + _EXACT)
    if "quartiles" in other and other["found"]:
        factors = tuple(each / other["found"] for each in other["quartiles"])
    low, high = target.get("quartiles") or [found * factor for factor in factors]
    return low, high


def _subject(report: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The command and the machine, which must be the same."""
    command = re.sub(r" --save| --rounds[ =]\d+", "", str(report["command"]))
    return command, [report["machine"].get(name) for name in _MACHINE]
