"""Prediction: how long devices wait for weights that are on the host. Nothing is measured here.

The schedule is played with the moves that a worker makes: while a stage is at work the weights of
the next one come, and after a stage's last backward its gradients go. A forward takes 2 operations
for each weight and token, a recomputation as many, a backward twice as many; a weight has 2 bytes,
and so has its gradient, each way on a bus of its own for each device. Fill-drain, everything
recomputed, 2,048 tokens in each micro-batch. What is said is the share of a mini-batch, without the
step of the optimizer, that is longer than with weights on the devices.

    python -m benchmarks.host_weights

Two kinds of devices: 80 teraflops and 20 GB/s, as a consumer's GPU on PCIe 4 may reach, and 400
teraflops and 50 GB/s, as an H100 on PCIe 5.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import NamedTuple

from benchmarks.harness import Report, options
from lightning_gpipe.core.schedules import (
    Action,
    Kind,
    Schedule,
    WeightMoves,
    counted,
    fill_drain,
    looped,
    weight_moves,
)


class Device(NamedTuple):
    """What a device does in a second.

    Attributes:
        operations: The floating-point operations that it computes.
        bytes: The bytes that come from the host, and as many that go there.
    """

    operations: float
    bytes: float


DEVICES = {"PCIe 4": Device(80e12, 20e9), "H100": Device(400e12, 50e9)}
LAYERS = {7: 32, 32: 64, 70: 80}  # billions of weights: of them each is a stage
OPERATIONS = {Kind.FORWARD: 2, Kind.RECOMPUTE: 2, Kind.BACKWARD: 4}  # for a weight and a token
BYTES = 2


def main(argv: list[str] | None = None) -> None:
    """Predict and print."""
    given = options("host_weights", __doc__, rounds=1, argv=argv, tokens=2048)
    chunks = (1, 4, 16, 64)
    report = Report(
        given,
        f"Predicted: share of a mini-batch that waits for weights, {given.tokens:,} tokens in each",
        columns=("", *(f"m = {m}" for m in chunks)),
    )
    for (name, device), billions, gpus in product(DEVICES.items(), LAYERS, (1, 8)):
        shares = [waiting(device, billions, gpus, m, given.tokens) for m in chunks]
        cells = [f"{100 * share:.0f} %" for share in shares]
        report.rows.append((f"{name}, {billions} billion weights, {counted(gpus, 'GPU')}", *cells))
    report.notes.append(
        "RoundPipe (arXiv 2604.27085), which keeps weights on the host in this way, reports 1.5 to "
        "2.2 times the throughput of others that do, measured on eight consumer GPUs. What is "
        "predicted here has no such peer: it says what weights on the host cost beside weights on "
        "devices that had room for them."
    )
    report.publish()


def waiting(device: Device, billions: int, gpus: int, m: int, tokens: int) -> float:
    """The share of the time that is spent on waiting for weights and gradients."""
    stages = LAYERS[billions]
    weights = 1e9 * billions / stages
    schedule = fill_drain(m, looped(stages, gpus), recomputed=m)
    cost = {kind: each * weights * tokens / device.operations for kind, each in OPERATIONS.items()}
    on_devices = played(schedule, cost, 0.0)
    return 1 - on_devices / played(schedule, cost, BYTES * weights / device.bytes)


def played(schedule: Schedule, cost: dict[Kind, float], transfer: float) -> float:
    """How long the schedule takes if the weights of a stage are ``transfer`` on their way."""
    moves = [weight_moves(row) for row in schedule.rows]
    last = {a.j: a for row in schedule.rows for a in row if a.kind is Kind.BACKWARD}
    waiting = [list(reversed(row)) for row in schedule.rows]
    free, coming, going = ([0.0] * schedule.workers for _ in range(3))
    there = [defaultdict[int, float](float) for _ in waiting]  # when the weights of a stage are
    asked: set[Action] = set()
    end: dict[Action, float] = {}
    present = {action for row in schedule.rows for action in row}
    progress = True
    while progress:
        progress = False
        for w, queue in enumerate(waiting):
            while queue:
                action = queue[-1]
                if action not in asked:  # a worker asks before it waits for what comes in
                    asked.add(action)
                    for j in moves[w].get(action, WeightMoves()).loads:
                        coming[w] = max(coming[w], free[w]) + transfer
                        there[w][j] = coming[w]
                needed = [each for each in schedule.needs(action) if each in present]
                if not all(each in end for each in needed):
                    break
                queue.pop()
                start = max([free[w], there[w][action.j], *(end[each] for each in needed)])
                free[w] = end[action] = start + cost[action.kind]
                if last[action.j] == action:
                    going[w] = max(going[w], free[w]) + transfer
                progress = True
    assert not any(waiting), "a schedule ends"
    return max(*free, *going)


if __name__ == "__main__":
    main()
