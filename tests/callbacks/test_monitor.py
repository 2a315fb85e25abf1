"""The monitor logs metrics, writes traces and pictures, and prints a line at the end.

Here are also the tests of ``running``.
"""

import re
import time
from datetime import timedelta
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure

from lightning_gpipe import GPipeStrategy, PipelineMonitor
from lightning_gpipe.callbacks import monitor as module
from lightning_gpipe.callbacks.monitor import TRACE
from lightning_gpipe.callbacks.running import RecordedStep
from lightning_gpipe.core.run import seconds_behind, spans_of_all
from lightning_gpipe.core.schedules import Action, Kind, Span
from lightning_gpipe.core.show import Slice, timeline_picture
from lightning_gpipe.distributed.group import Group
from tests.support.lightning_modules import Classifier, Data, fitted
from tests.support.ranks import Pool
from tests.support.traces import events_of, named
from tests.support.trainers import trainer_over
from tests.support.two_stacks import Translator

BUSY = re.compile(r"by the schedule\), its stages are busy for [\d.,]+ ms, [\d.,]+ ms\.\n")
NAMES = {
    "pipeline/bubble",
    "pipeline/bubble_by_schedule",
    "pipeline/imbalance",
    "pipeline/stage_0/busy",
    "pipeline/stage_0/wait_ms",
    "pipeline/stage_1/busy",
    "pipeline/stage_1/wait_ms",
    "pipeline/micro_batches_per_second",
    "pipeline/peak_memory_GiB/cpu",
}


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_draw", lambda: False)


def run(root: Path, callback: L.Callback, **options: Any) -> L.Trainer:
    strategy = options.pop("strategy", GPipeStrategy([3, 3], chunks=2, module="layers"))
    return fitted(root, strategy, devices=2, callbacks=[callback], max_epochs=2, **options)


def keep_pictures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that the monitor draws from now on."""
    drawn: list[Figure] = []

    def draw(*args: Any, **kwargs: Any) -> Figure:
        drawn.append(timeline_picture(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(module, "timeline_picture", draw)
    return drawn


def test_metrics_go_to_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="run")
    callback = PipelineMonitor(every_n_steps=1)

    run(tmp_path, callback, logger=logger)

    assert callback.metrics.keys() == NAMES
    assert callback.metrics["pipeline/bubble_by_schedule"] == pytest.approx(1 / 3, abs=0.2)
    shares = [callback.metrics[f"pipeline/stage_{j}/busy"] for j in range(2)]
    assert all(0 < share <= 1 for share in shares)
    assert callback.metrics["pipeline/bubble"] == pytest.approx(1 - sum(shares) / 2)
    columns = (tmp_path / "run/metrics.csv").read_text("utf-8").splitlines()[0].split(",")
    assert set(columns) >= NAMES
    assert (tmp_path / "run/pipeline_trace.json").exists()  # beside the logger's


@pytest.mark.parametrize("every, steps", [(1, 5), (100, 1)])
def test_trace_of_the_latest_steps(tmp_path: Path, every: int, steps: int) -> None:
    run(tmp_path, PipelineMonitor(every_n_steps=every, folder=tmp_path / "new"))

    events = events_of((tmp_path / "new/pipeline_trace.json").read_text("utf-8"))
    boxes = [each for each in events if each["ph"] == "X"]
    caller = [each["name"] for each in boxes if each["tid"] == 0]
    assert [caller.count(name) for name in ("training_step", "backward", "optimizer step")] == [
        steps
    ] * 3
    # Each of the two micro-batches has a forward and a backward, and one of them is recomputed.
    assert [sum(each["tid"] == w + 1 for each in boxes) for w in range(2)] == [5 * steps] * 2


def test_trace_of_virtual_stages(tmp_path: Path) -> None:
    strategy = GPipeStrategy([2, 1, 2, 1], chunks=2, module="layers")

    run(tmp_path, PipelineMonitor(every_n_steps=1, folder=tmp_path), strategy=strategy)

    events = events_of((tmp_path / "pipeline_trace.json").read_text("utf-8"))
    names = ["caller", "worker 0 (cpu), stages 0, 2", "worker 1 (cpu), stages 1, 3"]
    assert named(events, "process_name") == {0: "Classifier"}
    assert named(events, "thread_name") == dict(enumerate(names))
    boxes = [each for each in events if each["ph"] == "X"]
    assert {each["name"] for each in boxes if each["tid"] == 0} == {
        "training_step",
        "backward",
        "optimizer step",
        "between steps",
    }
    done = {(each["name"], each["args"]["stage"]) for each in boxes if each["tid"]}
    kinds = ["forward 0", "forward 1", "recompute 0", "backward 0", "backward 1"]
    assert done == set(product(kinds, range(4)))
    # Between each two stages, for each of two micro-batches, in the latest of five steps.
    arrows = [each["name"] for each in events if each["ph"] == "s"]
    assert {name: arrows.count(name) for name in arrows} == {"activations": 30, "gradients": 30}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "split_backward": True},
        {"schedule": "zero_bubble"},
    ],
    ids=["1f1b", "1f1b, split", "zero bubble"],
)
def test_loss_of_each_micro_batch(
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.undo()
    drawn = keep_pictures(monkeypatch)
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    callback = PipelineMonitor(every_n_steps=1, folder=tmp_path)
    strategy = GPipeStrategy([3, 3], chunks=2, module="layers", **options)

    run(tmp_path, callback, strategy=strategy)

    found = callback.metrics
    assert found.keys() == NAMES | {"pipeline/caller/busy"}
    shares = [found[f"pipeline/stage_{j}/busy"] for j in range(2)]
    assert found["pipeline/bubble"] == pytest.approx(1 - sum(shares) / 2)
    assert all(0 < share <= 1 for share in shares) and found["pipeline/caller/busy"] > 0
    assert BUSY.search(caplog.text)
    events = events_of((tmp_path / TRACE).read_text("utf-8"))
    boxes = [each for each in events if each["ph"] == "X"]
    caller = [each["name"] for each in boxes if each["tid"] == 3]
    # Two micro-batches of each of five steps.
    assert {name: caller.count(name) for name in caller} == {
        f"{verb} {i}": 5 for verb in ("prepare", "loss", "backward") for i in range(2)
    }
    weights = {each["tid"] for each in boxes if each["cat"] == "weights"}
    assert weights == (set() if options == {"schedule": "1f1b"} else {1, 2})
    labels = drawn[-1].axes[0].get_yticklabels()
    assert [label.get_text() for label in labels][2:] == ["cpu\ncaller"]
    assert (tmp_path / "pipeline_timeline.png").read_bytes().startswith(b"\x89PNG")


def test_line_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")

    run(tmp_path, PipelineMonitor(every_n_steps=1))

    assert "PipelineMonitor: a mini-batch takes" in caplog.text
    assert "PipelineMonitor: step 6 took" in caplog.text
    assert BUSY.search(caplog.text)
    assert "no picture, since matplotlib is missing: pip install matplotlib." in caplog.text


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    drawn = keep_pictures(monkeypatch)

    run(tmp_path, PipelineMonitor(every_n_steps=1, folder=tmp_path))

    assert (tmp_path / "pipeline_timeline.png").read_bytes().startswith(b"\x89PNG")
    [note] = [text.get_text() for text in drawn[-1].axes[0].texts if "bubble" in text.get_text()]
    assert re.match(
        r"step 6 took [\d.,]+ ms: pipeline .* ms; loading, callbacks and logging before it .*\n"
        r"one mini-batch of 2 micro-batches, bubble",
        note,
    )


def test_wait_outside_of_the_pipeline_is_named() -> None:
    """Once a long wait for data was not told from the pipeline's own."""
    caller = [Slice("between steps", 1.0, 5.0), Slice("training_step", 5.0, 6.0)]

    step = RecordedStep(3, [], caller, seconds=0.5)

    assert str(step) == (
        "step 3 took 5,000 ms: pipeline 500 ms; loading, callbacks and logging before it 4,000 ms; "
        "loss, hooks and optimizer 500 ms"
    )


@pytest.mark.parametrize("shown", [True, False])
def test_bubble_in_the_progress_bar(tmp_path: Path, shown: bool) -> None:
    callback = PipelineMonitor(every_n_steps=2, progress_bar=shown)

    made = run(tmp_path, callback)

    bubble = callback.metrics["pipeline/bubble"]
    expected = {"pipeline/bubble": pytest.approx(bubble)} if shown else {}
    assert made.progress_bar_metrics == expected


def test_several_pipelines(tmp_path: Path) -> None:
    callback = PipelineMonitor(every_n_steps=1)
    paths = ["layers.encoder", "layers.decoder"]
    strategy = GPipeStrategy([[2, 1], [2, 2]], chunks=2, module=paths)

    run(tmp_path, callback, strategy=strategy, build=Translator)

    assert {f"pipeline/{path}/bubble" for path in paths} <= callback.metrics.keys()


def test_without_a_logger_it_writes_into_the_root(tmp_path: Path) -> None:
    run(tmp_path, PipelineMonitor(), logger=False)

    assert (tmp_path / "pipeline_trace.json").exists()


def test_without_a_pipeline(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="PipelineMonitor is for a pipeline: got a Trainer with"):
        fitted(tmp_path, "auto", callbacks=[PipelineMonitor()])


@pytest.mark.parametrize("every, error", [(0, ValueError), (True, TypeError), ("1", TypeError)])
def test_bad_arguments(every: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="every_n_steps must be"):
        PipelineMonitor(every_n_steps=every)


# Over processes.


def over_processes(root: Path) -> tuple[dict[str, float], list[str]]:
    """What a process has logged, and which files it has written."""
    folder = root / f"of_rank_{torch.distributed.get_rank()}"
    callback = PipelineMonitor(every_n_steps=2, folder=folder)
    module.can_draw = lambda: False  # type: ignore[attr-defined]  # in a process of the tests
    made = trainer_over(root, "per_stage", [2, 4], {}, max_epochs=1, callbacks=[callback])
    made.fit(Classifier(), datamodule=Data())
    return callback.metrics, sorted(each.name for each in folder.glob("*"))


def test_first_process_shows_all_stages(two_ranks: Pool, tmp_path: Path) -> None:
    first, other = two_ranks.run(over_processes, tmp_path)

    each = {f"pipeline/peak_memory_GiB/rank_{rank}/cpu" for rank in range(2)}
    assert first[0].keys() == NAMES - {"pipeline/peak_memory_GiB/cpu"} | each
    assert first[0].keys() == other[0].keys()
    assert all(first[0][f"pipeline/stage_{j}/busy"] > 0 for j in range(2))
    assert (first[1], other[1]) == ([TRACE], [])
    events = events_of((tmp_path / "of_rank_0" / TRACE).read_text("utf-8"))
    assert {each["tid"] for each in events if each["ph"] == "X"} >= {0, 1}


def seen_at_five() -> list[Span]:
    """What all have recorded, each at 5 by a clock that is a day behind that of the one before."""
    group, rank = Group(timedelta(seconds=30)), torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: perf_counter() - rank * DAY)
        behind = seconds_behind(group.all)
    own = [Span(rank, Action(Kind.FORWARD, 0, rank), 5.0 - rank * DAY, 6.0)]
    return spans_of_all(group.all, own, behind)


def test_times_are_by_the_clock_of_the_first_process(two_ranks: Pool) -> None:
    first, other = two_ranks.run(seen_at_five)

    assert first == other
    assert {each.worker: each.start for each in first} == {0: 5.0, 1: pytest.approx(5.0, abs=0.1)}


DAY = 86400.0
