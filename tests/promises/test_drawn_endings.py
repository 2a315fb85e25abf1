"""No hang: whatever one process of a Trainer does or suffers, all end; 5 draws, 200 in a soak.

Drawn are the processes, the schedule, one of them, a place in its run, what happens there, and
whether callbacks save on errors. It may raise, die, be stopped or told to stop, or do alone what
all do together. Each process that is left ends, long before the timeout of half an hour, and names
the right one.
"""

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_gpipe.core.schedules import ScheduleName
from tests.support.acts import Act, gather, meet, reduce, run_the_model, save, take_a_batch
from tests.support.faults import OwnError
from tests.support.lightning_modules import Classifier, Data, six_layers
from tests.support.ranks import Failed, new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

FAULTS = 200 if settings().max_examples > 1000 else 5
LOST_AFTER = timedelta(seconds=3)
HOOKS = [
    "on_fit_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
]


def vote(trainer: L.Trainer) -> None:
    trainer.strategy.reduce_boolean_decision(True)


def burn(_: L.Trainer) -> None:
    raise OwnError("burnt")


def interrupt(_: L.Trainer) -> None:
    raise KeyboardInterrupt


def send(number: signal.Signals) -> Callable[[L.Trainer], None]:
    return lambda _: os.kill(os.getpid(), number)


ERRORS: dict[str, Act] = {"burn": burn, "interrupt": interrupt}
LOSSES: dict[str, Act] = {"kill": send(signal.SIGKILL), "stop": send(signal.SIGSTOP)}
TOLD: dict[str, Act] = {"terminate": send(signal.SIGTERM)}
WAITS: dict[str, Act] = {"save": save, "meet": meet, "vote": vote}
OF_PIPELINES: dict[str, Act] = {"run_the_model": run_the_model, "take_a_batch": take_a_batch}
OF_REPLICAS: dict[str, Act] = {"reduce": reduce, "gather": gather}
ACTS = ERRORS | LOSSES | TOLD | WAITS | OF_PIPELINES | OF_REPLICAS
TOLD_OR_ENDED = {"SIGTERMException", "none"}
SCHEDULES: list[ScheduleName] = ["fill_drain", "1f1b", "zero_bubble"]
# The processes of a pipeline, its balance, the pipelines, the devices, the processes.
WORLDS: dict[str, Any] = {
    "two": ("per_stage", [2, 4], 1, 2, 2),
    "three": ("per_stage", [2, 2, 2], 1, 3, 3),
    "replicas": ("single", [2, 4], 2, 4, 2),
    "pipelines": ("per_stage", [2, 4], 2, 4, 4),
}


class Fault(NamedTuple):
    """What happens in a run.

    Attributes:
        world: The processes, see ``WORLDS``.
        rank: The process to which it happens.
        act: What happens, see ``ACTS``.
        place: Where: in a hook, or in a layer.
        time: How often the run has come there.
        saves: Whether a callback saves on an error.
        schedule: The schedule.
    """

    world: str
    rank: int
    act: str
    place: str
    time: int
    saves: bool
    schedule: ScheduleName


def drawn(seed: int) -> Fault:
    draw = random.Random(seed)
    world = draw.choice(list(WORLDS))
    kinds = [
        ERRORS,
        LOSSES,
        TOLD,
        WAITS,
        OF_PIPELINES if world in ("two", "three") else OF_REPLICAS,
    ]
    kind = draw.choice(kinds)
    act = draw.choice(list(kind))
    places = [*HOOKS] if kind in kinds[3:] else [*HOOKS, "layer"]
    # Until a fit has started, SIGTERM ends a process as it does any, and there are no batches.
    if act in ("terminate", "take_a_batch"):
        places.remove("on_fit_start")
    place = draw.choice(places)
    times = 1 if place == "on_fit_start" else draw.choice([1, 2, 3])
    rank, saves = draw.randrange(WORLDS[world][-1]), draw.random() < 0.7
    return Fault(world, rank, act, place, times, saves, draw.choice(SCHEDULES))


class Faulty(Callback):
    """Lets the fault happen."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._left = fault.time
        self.trainer: Any = None
        if fault.place != "layer":
            setattr(self, fault.place, self._come)

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.trainer = trainer

    def _come(self, *_: Any, **__: Any) -> None:
        if self.trainer.sanity_checking or dist.get_rank() != self._fault.rank:
            return
        self._left -= 1
        if self._left == 0:
            now = str(time.time())
            (Path(self.trainer.default_root_dir) / "began").write_text(now, encoding="utf-8")
            ACTS[self._fault.act](self.trainer)

    def in_layer(self) -> None:
        if self._fault.place == "layer":
            self._come()


class Layer(nn.Module):
    """A layer in which the fault may happen."""

    def __init__(self, faulty: Faulty) -> None:
        super().__init__()
        self._come = faulty.in_layer

    def forward(self, x: Tensor) -> Tensor:
        self._come()
        return x.tanh()


def fit(root: Path, fault: Fault) -> tuple[str, int, float]:
    """What a fit ends with, after which step, and when."""
    warnings.simplefilter("ignore")
    processes, balance, replicas, devices, _ = WORLDS[fault.world]
    faulty = Faulty(fault)
    saves = [OnExceptionCheckpoint(root)] if fault.saves else []
    torch.manual_seed(0)
    layers = six_layers()
    for k in (1, 3, 5):
        layers[k] = Layer(faulty)
    strategy = {"lost_after": LOST_AFTER, "verify": False, "schedule": fault.schedule}
    made = trainer_over(
        root,
        processes,
        balance,
        strategy | ({"replicas": replicas} if replicas > 1 else {}),
        (devices, 1),
        callbacks=[faulty, *saves, ModelCheckpoint(root, every_n_train_steps=2)],
        enable_checkpointing=True,
        max_epochs=6,
    )
    message = "none"
    try:
        made.fit(Classifier(layers=layers), datamodule=Data())
    except BaseException as error:
        message = f"{type(error).__name__} | {error}"
    return message, made.global_step, time.time()


def wrong(fault: Fault, found: dict[int, tuple[str, int]]) -> list[str]:
    """What the processes that are left should not have said."""
    messages = {rank: message for rank, (message, _) in found.items()}
    if fault.act in TOLD:
        ends = {message.split(" ")[0] for message in messages.values()}
        same = len(ends) == 1 and len({step for _, step in found.values()}) == 1
        # Heartbeats tell of a signal, and a fit may come to its end before.
        right = {"SIGTERMException"} if fault.world in ("two", "three") else {*ends} & TOLD_OR_ENDED
        return [] if same and ends == right else list(messages.values())
    if fault.act in WAITS | OF_PIPELINES | OF_REPLICAS:
        named = ("OutOfStep | ", "RankFailed | ", "RuntimeError | rank ")
        return [
            each
            for each in messages.values()
            if not each.startswith(named) or f"rank {fault.rank}" not in each
        ]
    own = {"burn": "OwnError | burnt", "interrupt": "SystemExit | 1"}.get(fault.act)
    heard = r"(rank \d( \(stages? [\d, ]+\))? failed: RankFailed: )*"  # from one that heard of it
    others = rf"RankFailed \| {heard}rank {fault.rank} "
    return [
        each
        for rank, each in messages.items()
        if not (each.startswith(str(own)) if rank == fault.rank else re.match(others, each))
    ]


def survive(root: Path, fault: Fault) -> tuple[list[str], float]:
    """What is wrong with how the processes have ended, and how long after the fault they have."""
    size = WORLDS[fault.world][-1]
    with new_ranks(size) as ranks:
        ranks.start(fit, root, fault)
        left = [k for k in range(size) if k != fault.rank or fault.act not in LOSSES]
        results = {rank: ranks.result(rank) for rank in left}

    failed = [str(each) for each in results.values() if isinstance(each, Failed)]
    if failed:
        return failed, 0.0
    began = float((root / "began").read_text(encoding="utf-8"))
    found = {rank: (message, step) for rank, (message, step, _) in results.items()}
    return wrong(fault, found), max(end for _, _, end in results.values()) - began


@pytest.mark.parametrize("seed", range(FAULTS))
def test_all_processes_end_and_name_the_right_one(tmp_path: Path, seed: int) -> None:
    fault = drawn(seed)

    assert survive(tmp_path, fault)[0] == [], fault
