"""How long devices wait for weights that are on the host: predicted, and measured on a GPU.

The schedule is played with the moves that a worker makes: while a stage is at work the weights of
the next one come, and after a stage's last backward its gradients go. A forward takes 2 operations
for each weight and token, a recomputation as many, a backward twice as many; a weight has 2 bytes,
and so has its gradient, each way on a bus of its own for each device. Fill-drain, everything
recomputed, 2,048 tokens in each micro-batch. What is said is the share of a mini-batch, without the
step of the optimizer, that is longer than with weights on the devices.

    python -m benchmarks.host_weights

Two kinds of devices: 80 teraflops and 20 GB/s, as a consumer's GPU on PCIe 4 may reach, and 400
teraflops and 50 GB/s, as an H100 on PCIe 5.

With a GPU, steps of transformer blocks in bfloat16 follow, which fit the device: with weights on it
and on the host, and under FSDP2 with CPUOffloadPolicy, in turns. The prediction beside them has the
measured time with weights on the device, and the measured speed of its bus.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.contestants.offloaded import offloaded
from benchmarks.contestants.plain import mean_square
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, Options, Report, Times, agree, contest, options, ratio
from benchmarks.harness.gauge import Gauge
from benchmarks.models.transformer import transformer
from lightning_gpipe import GPipe
from lightning_gpipe.core.balance import Place
from lightning_gpipe.core.layout import Weights
from lightning_gpipe.core.planner.action_costs import ActionCosts
from lightning_gpipe.core.planner.stage_cost import MicroBatchCost
from lightning_gpipe.core.planner.waves import waves_of
from lightning_gpipe.core.profile.meters import host_speed
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
CHUNKS = (1, 4, 16, 64)
ON_DEVICE, ON_HOST, PEER = "on the device", "on the host", "FSDP2, offloaded"


def main(argv: list[str] | None = None) -> None:
    """Predict and print."""
    given = options("host_weights", __doc__, rounds=5, argv=argv, tokens=2048, blocks=8, width=4096)
    report = Report(
        given,
        f"Predicted: share of a mini-batch that waits for weights, {given.tokens:,} tokens in each",
        columns=("", *(f"m = {m}" for m in CHUNKS)),
    )
    for (name, device), billions, gpus in product(DEVICES.items(), LAYERS, (1, 8)):
        shares = [waiting(device, billions, gpus, m, given.tokens) for m in CHUNKS]
        row = f"{name}, {billions} billion weights, {counted(gpus, 'GPU')}"
        report.rows.append((row, *map(percent, shares)))
    if torch.cuda.is_available():
        measured(given, report, "cuda:0")
    report.notes.append(
        "RoundPipe (arXiv 2604.27085), which keeps weights on the host in this way, reports 1.5 to "
        "2.2 times the throughput of others that do, measured on eight consumer GPUs. What "
        "is said here has another measure: weights on devices that have room for them."
    )
    report.publish()


def waiting(device: Device, billions: int, gpus: int, m: int, tokens: int) -> float:
    """The share of the time that is spent on waiting for weights and gradients."""
    stages = LAYERS[billions]
    weights = 1e9 * billions / stages
    forward = 2 * weights * tokens / device.operations
    return share(forward, BYTES * weights / device.bytes, stages, gpus, m)


def share(forward: float, transfer: float, stages: int, gpus: int, m: int) -> float:
    """The same of equal stages: seconds of a forward, and of its weights' way from the host."""
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


def measured(given: Options, report: Report, device: str) -> None:
    """Add what is found on a device, and what is predicted for it."""
    with torch.device(device):
        module = transformer(given.blocks, given.width).bfloat16()
    weights = sum(parameter.nbytes for parameter in module[0].parameters())
    transfer = weights / host_speed(torch.device(device), weights) if device != "cpu" else 0.0
    rows: dict[str, list[str]] = {ON_HOST: [], PEER: [], "predicted": []}
    for m in CHUNKS[:3]:
        x = torch.randn(m, given.tokens, given.width, dtype=torch.bfloat16, device=device)
        times = in_turns(Task(module, x, torch.zeros_like(x), mean_square), m, device, given.rounds)
        for each in (ON_HOST, PEER):
            rows[each].append(percent(1 - ratio(times, ON_DEVICE, each)))
        forward = times[ON_DEVICE].median / m / given.blocks / 4
        rows["predicted"].append(percent(share(forward, transfer, given.blocks, 1, m)))
    title = f"{given.blocks} blocks of {weights / BYTES / 1e6:.0f} million weights, "
    report.rows += [(title + each, *cells, "-") for each, cells in rows.items()]


def in_turns(task: Task, m: int, device: str, rounds: int) -> dict[str, Times]:
    """How long steps with weights here and there take."""
    with ExitStack() as stack:
        contestants = [
            stack.enter_context(pipeline(task, m, device, "device", ON_DEVICE)),
            stack.enter_context(pipeline(task, m, device, "host", ON_HOST)),
            stack.enter_context(offloaded(task, chunks=m, device=device, name=PEER)),
        ]
        agree(contestants, rtol=0.05)  # bfloat16, sums in another order
        return contest(contestants, rounds=rounds, synchronize=Gauge([device]).synchronize)


@contextmanager
def pipeline(task: Task, m: int, device: str, weights: Weights, name: str) -> Iterator[Contestant]:
    """Ours on one device, a stage for each layer, everything recomputed."""
    module = task.copy_of_module()
    model = GPipe(
        module.cpu() if weights == "host" else module,
        [1] * len(module),
        devices=[device],
        chunks=m,
        activation_checkpointing="always",
        weights=weights,
    )
    try:
        yield task.contestant(name, model, list(model.parameters()))
    finally:
        model.close()


def percent(share: float) -> str:
    """Such as "3 %"."""
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    main()
