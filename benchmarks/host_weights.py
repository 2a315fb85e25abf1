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

from itertools import product
from typing import NamedTuple

from benchmarks.harness import Report, options
from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.planner.waves import waves_of
from lightning_gpipe.core.schedules import FILL_DRAIN, counted, looped


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
    forward = 2 * weights * tokens / device.operations
    transfer = BYTES * weights / device.bytes
    on_devices, on_host = (
        predicted(MicroBatchCost(forward, forward, 2 * forward, 0.0), stages, gpus, m, transfers)
        for transfers in ([], [(transfer, transfer)] * stages)
    )
    return 1 - on_devices / on_host


def predicted(
    cost: MicroBatchCost, stages: int, gpus: int, m: int, transfers: list[tuple[float, float]]
) -> float:
    """How long a mini-batch takes, of which all is recomputed."""
    recomputed, places = (m,) * stages, [Place()] * stages
    costs = ActionCosts({1: [cost] * stages}, [1] * m, recomputed, places, transfers=transfers)
    waves = waves_of(
        FILL_DRAIN, m, looped(stages, gpus), recomputed, from_host=costs.transfers is not None
    )
    return waves.makespan(costs)


if __name__ == "__main__":
    main()
