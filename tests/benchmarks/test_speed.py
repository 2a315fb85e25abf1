"""The published experiments run, small, and all benchmarks together; no figure is judged."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import __main__ as everything
from benchmarks import amoebanet_speed, published, resnet_speed, unet_speed
from benchmarks.__main__ import Kind, Outcome, Run
from benchmarks.amoebanet_speed import AMOEBANET
from benchmarks.contestants.plain import accumulated
from benchmarks.contestants.task import Task
from benchmarks.harness import Contestant, Report, agree, competitor, contest, options, ratio
from benchmarks.harness.gauge import Gauge, Peak
from benchmarks.models import amoebanetd, resnet101, unet
from benchmarks.published import THEIRS, Experiment, Size, placement, rounds_in, scaled
from benchmarks.resnet_speed import RESNET
from benchmarks.unet_speed import UNET


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As these tests are about what surrounds the figures."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def tiny(*, deferred: bool = True) -> Experiment:
    """An experiment of hardly anything: a cut after each of the first three layers."""

    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout2d(0.5),
            nn.Flatten(),
            nn.Linear(144, 10),
        )

    size = Size(build, side=8, batch=8, chunks=2)
    return Experiment(
        "Tiny", [1, 1, 1, 2], size, size, F.cross_entropy, published.classes_of, "Never.", deferred
    )


def json_in(printed: str) -> dict[str, Any]:
    return json.loads(printed[printed.index("\n{\n") :])


# The experiments.


@pytest.mark.parametrize("experiment", [UNET, AMOEBANET, RESNET], ids=lambda each: each.title)
def test_published_balance_fits_both_sizes(experiment: Experiment) -> None:
    for size in (experiment.full, experiment.small):
        with torch.device("meta"):
            module = size.build()
            output = module(images := torch.empty(2, 3, size.side, size.side))
            target = experiment.target(images)
        assert len(module) == sum(experiment.balance)
        assert experiment.loss(output, target).shape == ()
        assert size.batch % size.chunks == 0
        assert size.batch // size.chunks >= 2  # for batch norms, and so that all make as many


SHALLOW = {  # the depth is what takes time
    "UNET": (unet_speed, [16, 16, 16, 17], Size(lambda: unet(1, 2), 64, 4, 2)),
    "AMOEBANET": (amoebanet_speed, [2, 2, 2, 3], Size(lambda: amoebanetd(3, 16), 64, 8, 2)),
    "RESNET": (resnet_speed, RESNET.balance, Size(lambda: resnet101(width=2), 64, 8, 2)),
}


@pytest.mark.parametrize("name", SHALLOW)
def test_small_run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchgpipe")
    module, balance, small = SHALLOW[name]
    experiment: Experiment = getattr(module, name)
    monkeypatch.setattr(module, name, replace(experiment, balance=balance, small=small))

    module.main(["--rounds", "3", "--seconds", "0.1"])

    printed = capsys.readouterr().out
    assert len(json_in(printed)["rows"]) == (5 if experiment.deferred else 4)
    assert "Nothing is claimed" in printed


def test_claims_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A CPU that is called by another name, and half of the memory that the full size wants.
    peaks = {THEIRS: 2.0, "ours, 1 worker": 1.0, "ours, 4 workers": 3.0}
    alone = published.alone

    def weighed(make: published.Make, places: list[str]) -> tuple[Peak, float]:
        with make() as contestant:
            peak = peaks.get(contestant.name, 1.0)
        return Peak(peak, 2 * peak), alone(make, places)[1]

    gpu = SimpleNamespace(total_memory=published.FULL_SIZE / 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(published, "placement", lambda gpus: ["cpu:0"] * 4)
    monkeypatch.setattr(published, "alone", weighed)
    monkeypatch.setattr(published, "torchgpipe", same_as_plain)
    small = replace(tiny().small, build=lambda: tiny().small.build())
    experiment = replace(tiny(), full=replace(tiny().full, batch=16), small=small)

    published.measure("unet_speed", None, experiment, ["--rounds", "3"])

    found = json_in(capsys.readouterr().out)
    assert "8 images of 8 x 8, 4 stages on one GPU" in found["title"]
    met = {target["claim"]: (target["target"], target["met"]) for target in found["targets"]}
    assert met["peak memory allocated, ours, 1 worker / torchgpipe"] == ("at most 1", True)
    assert met["peak memory reserved, ours, 4 workers / torchgpipe"] == ("at most 1", False)
    assert met["throughput, ours, 4 workers / torchgpipe"][0] == "at least 1"
    assert met["throughput, ours, 1 worker, deferred / torchgpipe"][0] is None
    assert found["notes"][1].startswith("Stages share one GPU")


def same_as_plain(task: Task, balance: list[int], *, name: str, **how: object) -> Contestant:
    return accumulated(task, chunks=2, name=name)


def test_without_the_competitor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchgpipe", None)  # as if it were not installed

    published.measure("unet_speed", None, tiny(), ["--rounds", "3"])

    printed = capsys.readouterr().out
    found = json_in(printed)
    assert [row["samples/s"] for row in found["rows"]][1] == "-"
    assert "not installed" in printed
    for target in found["targets"]:
        assert target["found"] is None and target["met"] is None


def test_difference_is_found_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args, **kwargs):
        return Contestant(THEIRS, lambda: pytest.fail("was timed"), lambda: [torch.ones(())] * 6)

    monkeypatch.setattr(published, "torchgpipe", wrong)

    with pytest.raises(AssertionError, match="torchgpipe must compute the same gradients"):
        published.measure("unet_speed", None, tiny(), ["--rounds", "1"])


def test_chosen_sizes() -> None:
    experiment = replace(tiny(), full=Size(tiny().full.build, side=9, batch=64, chunks=4))

    def chosen(*argv: str) -> Size:
        more = {"size": "", "batch": 0, "chunks": 0}
        return published.choose(experiment, options("it", None, rounds=1, argv=argv, **more), "cpu")

    assert chosen() is experiment.small
    assert chosen("--size", "full") is experiment.full
    assert chosen("--batch", "6", "--chunks", "3").chunks == 3
    assert chosen("--batch", "6").batch == 6


@pytest.mark.parametrize(
    "gpus, expected",
    [
        (0, ["cpu"] * 4),
        (1, ["cuda:0"] * 4),
        (2, ["cuda:0", "cuda:1"] * 2),
        (3, ["cuda:0", "cuda:1"] * 2),
        (8, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ],
)
def test_placement(gpus: int, expected: list[str]) -> None:
    assert placement(gpus) == expected


@pytest.mark.parametrize("memory, expected", [(80, 256), (70, 256), (35, 128), (24, 80), (1, 32)])
def test_batch_for_a_smaller_gpu(memory: int, expected: int) -> None:
    assert scaled(256, 16, memory * 2**30) == expected


@pytest.mark.parametrize("each, expected", [(0.1, 15), (5.0, 7), (100.0, 3)])
def test_rounds_that_there_is_time_for(each: float, expected: int) -> None:
    assert rounds_in(35.0, each, 15) == expected


# The harness.


class FakeCuda:
    """Counts bytes as torch.cuda does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.most = 100, 100
        for name in ("memory_allocated", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.now)
            monkeypatch.setattr(torch.cuda, f"max_{name}", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def reset(self, device: torch.device) -> None:
        self.most = self.now

    def take(self, number: int) -> None:
        self.now += number
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("devices, times", [(["cuda:0"] * 4, 1), (["cuda:0", "cuda:1"], 2)])
def test_gauge(monkeypatch: pytest.MonkeyPatch, devices: list[str], times: int) -> None:
    cuda = FakeCuda(monkeypatch)
    gauge = Gauge(devices)

    def work() -> None:
        cuda.take(30)
        cuda.take(-20)

    cuda.take(1000)
    cuda.take(-993)  # what was before does not count, but what stayed of it does
    assert gauge.peak(work) == Peak(37 * times, 37 * times)


def test_gauge_without_a_gpu() -> None:
    peak = Gauge(["cpu"]).peak(lambda: None)

    assert math.isnan(peak.allocated) and math.isnan(peak.reserved)


def test_contestant_of_a_package_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    @competitor("no_such_package")
    def theirs(*, name: str) -> Contestant:
        import no_such_package.inner  # type: ignore[import-not-found]  # that is the point

        return no_such_package.inner

    ours = Contestant("ours", lambda: None, lambda: [torch.ones(2)])
    contestants = [theirs(name="theirs"), ours]

    agree(contestants)
    times = contest(contestants, rounds=2, warm_up=0)
    report = Report(options("it", None, rounds=2, argv=[]), "It")
    report.times(times)
    report.target("ours / theirs", ratio(times, "ours", "theirs"), at_most=1.0)
    report.publish()

    printed = capsys.readouterr().out
    assert "not installed" in printed and "not measured" in printed
    assert json_in(printed)["targets"][0]["met"] is None


def test_another_missing_module_is_an_error() -> None:
    @competitor("torchgpipe")
    def theirs() -> Contestant:
        import no_such_package  # noqa: F401

        return Contestant("theirs", list, list)

    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        theirs()


# All together.


REPORT = """\
{
  "benchmark": "it",
  "targets": [
    {"claim": "a", "found": 0.5, "target": "at most 1", "met": true},
    {"claim": "b", "found": 2.0, "target": "at most 1", "met": false},
    {"claim": "c", "found": null, "target": "at most 1", "met": null},
    {"claim": "d", "found": 7.0, "target": null, "met": true}
  ]
}
"""


def python(name: str, code: str, limit: float = 600.0) -> Run:
    return Run(name, limit, ("-c", code))


def test_one_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    runs = [
        python("broken", "raise SystemExit(3)"),
        python("slow", "import time; time.sleep(600)", limit=0.5),
        python("good", f"import os; print(os.environ.get('OMP_WAIT_POLICY')); print({REPORT!r})"),
    ]
    monkeypatch.setattr(everything, "KINDS", {"cpu": Kind(runs, 600.0)})

    with pytest.raises(SystemExit, match="did not run to their end: broken, slow"):
        everything.main(["cpu"])

    printed = capsys.readouterr().out
    for words in ("failed with exit code 3", "stopped after", "good: done", "None", "NOT met"):
        assert words in printed
    assert '"benchmark"' not in printed  # JSON is for files


def test_targets_not_met_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = python("good", f"print({REPORT!r})")
    monkeypatch.setattr(everything, "KINDS", {"cpu": Kind([run, python("other", "1/0")], 600.0)})

    everything.main(["cpu", "--only", "good"])


def test_table_of_targets() -> None:
    outcome = Outcome(Run("it", 1.0), reports=[json.loads(REPORT)])

    _, targets = everything.tables([outcome])

    cells = [list(column.cells) for column in targets.columns]
    assert cells[1] == ["a", "b", "c"]
    assert cells[2] == ["0.500", "2.000", "-"]
    assert cells[4] == ["met", "NOT met", "not measured"]


def test_no_time_left() -> None:
    outcomes = list(everything.execute_all([python("late", "pass")], 0.0, save=False))

    assert outcomes[0].problem == "no time was left for it"


@pytest.mark.parametrize("kind", everything.KINDS)
def test_runs_are_benchmarks(kind: str) -> None:
    folder = Path(everything.__file__).parent
    for run in everything.KINDS[kind].runs:
        assert run.command or (folder / f"{run.name}.py").exists(), run.name
        assert run.arguments(save=True)[-1] == "--save" or run.command
