"""Claim: an example learns the same, however its pipeline is spread over processes and replicas.

Each example is trained by its own configuration for a few steps, as a user would: on one device by
a plain Trainer, as a pipeline of threads, of a process per stage, and of a process per machine (two
machines, which are two torchrun here, with two stages each). And as two replicas: of a plain model
by Lightning's DDP, of a pipeline of threads, and of two processes per pipeline.

    python -m benchmarks.arrangements

For every run the first and the last training loss, and the largest difference of a step's loss from
that of another run on the same batches, relative to it: to the bit none between processes and
threads.
"""

from __future__ import annotations

import csv
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report, options

CONFIGS = Path(__file__).parents[1] / "examples/configs"
FOUR_STAGES = {
    "char_lm": [1, 1, 1, 1],
    "seq_classifier": [1, 1, 1, 1],
    "unet_segmentation": [6, 5, 5, 5],
    "finetune_llama": [1, 1, 1, 1],
}
AT_MOST = 1e-3  # of float32, after some steps
_WITHIN = 600.0  # seconds, for one run


@dataclass(frozen=True)
class Arrangement:
    """Which devices, processes and replicas there are.

    Attributes:
        name: What it is called.
        options: Of the Trainer.
        strategy: Of GPipeStrategy; None for one of Lightning's own.
        like: The arrangement whose losses it should have.
        exact: Whether to the bit.
        machines: On how many it is started, by torchrun.
        four: Whether it has four stages.
    """

    name: str
    options: tuple[str, ...]
    strategy: tuple[str, ...] | None = ()
    like: str = ""
    exact: bool = False
    machines: int = 0
    four: bool = False


PLAIN, THREADS, DDP, REPLICAS = "one device", "threads", "DDP, 2 processes", "2 replicas of threads"
ARRANGEMENTS = (
    Arrangement(PLAIN, ("--trainer.strategy=auto", "--trainer.devices=1"), None),
    Arrangement(THREADS, ("--trainer.devices=2",), like=PLAIN),
    Arrangement(
        "per_stage", ("--trainer.devices=2",), ("processes=per_stage",), THREADS, exact=True
    ),
    Arrangement("threads, 4 stages", ("--trainer.devices=4",), like=PLAIN, four=True),
    Arrangement(
        "per_node, 2 machines, 4 stages",
        ("--trainer.devices=2", "--trainer.num_nodes=2"),
        ("processes=per_node",),
        "threads, 4 stages",
        exact=True,
        machines=2,
        four=True,
    ),
    Arrangement(DDP, ("--trainer.strategy=ddp", "--trainer.devices=2"), None),
    Arrangement(REPLICAS, ("--trainer.devices=4",), ("replicas=2",), DDP),
    Arrangement(
        "2 replicas per_stage",
        ("--trainer.devices=4",),
        ("replicas=2", "processes=per_stage"),
        REPLICAS,
        exact=True,
    ),
)


def main(argv: list[str] | None = None) -> None:
    """Train and compare."""
    given = options(
        "arrangements", __doc__, rounds=1, argv=argv, steps=20, only=",".join(FOUR_STAGES)
    )
    report = Report(
        given,
        f"The training loss of {given.steps} steps",
        columns=("", "first", "last", "compared with", "largest difference"),
    )
    for example in given.only.split(","):
        losses: dict[str, list[float]] = {}
        for each in ARRANGEMENTS:
            found = losses[each.name] = trained(example, each, given.steps)
            ends = f"{found[0]:.5f}", f"{found[-1]:.5f}"
            name = f"{example}, {each.name}"
            if not each.like:
                report.rows.append((name, *ends, "", ""))
                continue
            apart = difference(found, losses[each.like])
            report.rows.append((name, *ends, each.like, f"{apart:.1e}"))
            report.target(f"{name} / {each.like}", apart, at_most=0.0 if each.exact else AT_MOST)
    report.publish()


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of a step's loss; infinite if there are other steps."""
    if len(found) != len(expected):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


def trained(example: str, arrangement: Arrangement, steps: int) -> list[float]:
    """The training loss of each step of an example, run by its configuration.

    Raises:
        RuntimeError: If the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("-m", "lightning_gpipe", "fit", f"--config={CONFIGS / example}.yaml"),
            *arrangement.options,
            *strategy_of(example, arrangement),
            f"--trainer.max_steps={steps}",
            "--trainer.max_epochs=-1",
            "--trainer.limit_val_batches=0",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_checkpointing=false",
            "--trainer.enable_progress_bar=false",
            f"--trainer.logger.init_args.save_dir={folder}",
        ]
        _run(command, arrangement.machines)
        (metrics,) = Path(folder).rglob("metrics.csv")
        with metrics.open() as file:
            return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def strategy_of(example: str, arrangement: Arrangement) -> list[str]:
    """The arguments of the strategy, which are those of the configuration but for a few."""
    if arrangement.strategy is None:
        return []
    balance = [f"balance={FOUR_STAGES[example]}"] if arrangement.four else []
    given = [*arrangement.strategy, *balance]
    return [f"--trainer.strategy.init_args.{each}" for each in given]


def _run(command: list[str], machines: int) -> None:
    """Run Python with these arguments, by torchrun on each of so many machines if there are any."""
    here = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUTF8="1")
    if not machines:
        started = [command]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ours = ["-m", "torch.distributed.run", f"--nnodes={machines}", "--nproc_per_node=1"]
        where = ["--master_addr=127.0.0.1", f"--master_port={port}"]
        started = [[*ours, f"--node_rank={k}", *where, *command] for k in range(machines)]
    processes = [
        subprocess.Popen(
            [sys.executable, *each],
            env=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in started
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=_WITHIN)
            if process.returncode:
                raise RuntimeError(f"a run must end well: {' '.join(command)} said\n{said}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
