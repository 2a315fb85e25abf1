"""``plan`` chooses how to run a configuration's model on devices that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not among our extras
from torch import Tensor, nn

from lightning_gpipe.commands.plan import plan_command
from lightning_gpipe.core.show import can_draw
from tests.support.lightning_modules import FEATURES, Classifier

pytestmark = pytest.mark.usefixtures("lightning_cli")

HERE = "tests.commands.test_plan"


class OnMeta(Classifier):
    """Made on the meta device, which a model larger than the machine is."""

    def __init__(self, optimizer: str = "adam", scheduled: bool = False) -> None:
        layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(8)))
        super().__init__(optimizer, scheduled, layers)
        self.to("meta")


class OfAFewWords(Classifier):
    def __init__(self, optimizer: str = "adam", scheduled: bool = False) -> None:
        print("a line of the user's")
        super().__init__(optimizer, scheduled)


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no neighbours")


class CannotRunAlone(Classifier):
    def __init__(self, optimizer: str = "adam", scheduled: bool = False) -> None:
        layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), Alone(), nn.Tanh())
        super().__init__(optimizer, scheduled, layers)


class RejectsItsInput(Classifier):
    def __init__(self, optimizer: str = "adam", scheduled: bool = False) -> None:
        layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(4, FEATURES), nn.Tanh())
        super().__init__(optimizer, scheduled, layers)


class OfNoOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return "adam"


def configured(folder: Path, model: str | None = None, **trainer: Any) -> str:
    """The path of a configuration."""
    values = {
        "trainer": {"accelerator": "gpu", "devices": 2, "strategy": "gpipe", **trainer},
        "model": {"class_path": model or f"{Classifier.__module__}.Classifier"},
        "data": {"class_path": "tests.support.lightning_modules.Data"},
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--config {configured(tmp_path)} --devices 3 --device-memory 1GiB --stages 2"
    assert plan_command(arguments.split()) == 0

    printed = capsys.readouterr().out
    for part in ("2 stages", "bubble", "rows/s", "layers.0", "parameters", "GiB", "alternatives"):
        assert part in printed


def test_stages_of_several_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"processes": "per_stage", "tensor_parallel": 2}
    strategy = {"class_path": "lightning_gpipe.GPipeStrategy", "init_args": arguments}
    config = configured(tmp_path, f"{HERE}.OnMeta", strategy=strategy)
    given = ["--config", config, "--measure-on", "meta", "--stages", "2", "--chunks", "2"]
    assert plan_command([*given, "--devices", "4", "--device-memory", "1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensor_parallel"] == 2
    assert [stage["device"] for stage in found["stages"]] == [0, 1]

    plain = ["--config", configured(tmp_path, f"{HERE}.OnMeta"), *given[2:]]
    assert plan_command([*plain, "--devices", "2", "--device-memory", "2MiB", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert found["time"] == pytest.approx(whole["time"] / 2)

    config = configured(tmp_path, f"{HERE}.OnMeta", strategy=strategy)
    assert plan_command([*given, "--devices", "4"]) == 0
    assert "a device above stands for 2, among which" in capsys.readouterr().out
    assert plan_command([*given, "--devices", "3"]) == 1
    assert "--devices must be a multiple of tensor_parallel: got 3" in capsys.readouterr().err


@pytest.mark.parametrize("processes", ["single", "per_stage"])
def test_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: str) -> None:
    def planned(*others: str, **arguments: Any) -> Any:
        given = {"replicas": 2, "processes": processes, "lost_after": "0:00:20", **arguments}
        strategy = {"class_path": "lightning_gpipe.GPipeStrategy", "init_args": given}
        config = configured(tmp_path, f"{HERE}.OnMeta", strategy=strategy)
        status = plan_command(["--config", config, "--measure-on", "meta", *others])
        printed = capsys.readouterr()
        return printed.err if status else json.loads(printed.out) if "--json" in others else printed

    large = planned("--devices", "4", "--device-memory", "1MiB", "--json")
    assert (large["replicas"], large["sharding"]) == (2, None)
    assert {stage["device"] for stage in large["stages"]} <= {0, 1}
    kinds = ("parameters", "gradients", "optimizer", "buffers")
    held = sum(stage["memory"][kind] for stage in large["stages"] for kind in kinds)
    little = f"{0.95 * held / 2:.0f}B"  # of two devices, which have no room for all
    sizes = little, "1MiB", "1MiB", little  # the least of both replicas
    small = planned("--devices", "4", "--device-memory", *sizes, "--json", sharding="optimizer")
    assert small["sharding"] == "optimizer"
    states = (sum(stage["memory"]["optimizer"] for stage in x["stages"]) for x in (small, large))
    assert next(states) == next(states) / 2

    tables = planned("--devices", "4", "--device-memory", little)
    for part in (
        "sharding='optimizer'",
        "replicas=2: the devices above are those of one",
        "divided",
    ):
        assert part in tables.out
    error = planned("--devices", "3")
    assert "--devices must be a multiple of replicas: got 3 devices for 2 pipelines" in error


def test_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path, f"{HERE}.OfAFewWords")
    assert plan_command(["--config", config, "--devices", "2", "--stages", "2", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    first, last = found["stages"]
    assert (first["device"], last["device"]) == (0, 1)
    assert [*first["layers"], *last["layers"]] == [f"layers.{k}" for k in range(6)]
    assert found["time"] > 0
    assert found["memory"] == first["memory"]["total"] + last["memory"]["total"]


@pytest.mark.parametrize(
    "asked, configured_as, found",
    [
        ([], "fill_drain", "fill_drain"),
        ([], "1f1b", "1f1b"),
        (["--schedule", "zero_bubble"], "1f1b", "zero_bubble"),
    ],
)
def test_schedule(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
    configured_as: str,
    found: str,
) -> None:
    strategy = {
        "class_path": "lightning_gpipe.GPipeStrategy",
        "init_args": {"schedule": configured_as},
    }
    config = configured(tmp_path, f"{HERE}.OnMeta", strategy=strategy)
    devices = ["--devices", "4", "--stages", "4", "--chunks", "8"]
    assert plan_command(["--config", config, *devices, *asked, "--json"]) == 0

    chosen = json.loads(capsys.readouterr().out)
    assert chosen["schedule"] == found
    assert {each["schedule"] for each in chosen["alternatives"]} == {
        "fill_drain",
        "1f1b",
        "zero_bubble",
    }


def test_model_on_the_meta_device_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, f"{HERE}.OnMeta")
    devices = ["--devices", "4", "--device-speed", "1TFLOPS"]
    chosen = ["--stages", "4", "--chunks", "4", "--json"]
    assert plan_command(["--config", config, *devices, *chosen]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["unit"], found["balance"]) == ("s", [2, 2, 2, 2])
    rows = found["rows"]
    forward = 2 * rows * FEATURES**2 / 1e12
    assert found["stages"][1]["time"] == pytest.approx(2 * 3 * forward)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_model_on_the_meta_device_with_a_strategy_that_is_no_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Lightning's strategies end with ``.cpu()``, which fails for a meta tensor."""
    config = configured(tmp_path, f"{HERE}.OnMeta", strategy=strategy)
    assert plan_command(["--config", config, "--devices", "2", "--stages", "2", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["balance"] == [4, 4]


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--config {configured(tmp_path)} --devices 2 --device-memory 100B".split()
    assert plan_command(arguments) == 1

    printed = capsys.readouterr()
    assert "a plan must fit the memory of the devices: none does" in printed.err
    assert "GiB on device" in printed.err
    assert "fewer rows" not in printed.err  # the parameters alone do not fit
    assert "stages" in printed.out


@pytest.mark.parametrize(
    "devices, fits", [("--stages 1 --devices 8", True), ("--devices 2", False)]
)
def test_nothing_fits_as_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: str, fits: bool
) -> None:
    config = configured(tmp_path, f"{HERE}.OfAFewWords")
    memory = "7KiB" if fits else "100B"
    arguments = f"--config {config} {devices} --device-memory {memory} --json"
    assert plan_command(arguments.split()) == 1

    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["error"] in printed.err
    nearest = found["nearest"]["stages"]
    assert found["missing"] == [
        {"device": stage["device"], "stage": j, "bytes": stage["memory"]["total"] - stage["limit"]}
        for j, stage in enumerate(nearest)
    ]
    assert found["needed"] == max(stage["memory"]["total"] for stage in nearest)
    assert bool(found["fitting"]) == fits
    for stage in found["fitting"][-1]["stages"] if fits else ():
        assert stage["memory"]["total"] <= stage["limit"]


def test_configuration_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("trainer: {max_epochs: 1}\n", encoding="utf-8")

    assert plan_command(["--config", str(path), "--devices", "2"]) == 1
    assert "needs a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, said",
    [
        ("CannotRunAlone", ["no neighbours", "raised in layer 1 (Alone), which ran by itself on"]),
        (
            "RejectsItsInput",
            ["cannot be multiplied", "raised in layer 1 (Linear)", "Pass an input"],
        ),
        ("OfNoOptimizer", ["Unknown configuration for model optimizers"]),
    ],
)
def test_models_that_cannot_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, said: list[str]
) -> None:
    config = configured(tmp_path, f"{HERE}.{model}")
    assert plan_command(["--config", config, "--devices", "2", "--json"]) == 1

    printed = capsys.readouterr()
    assert printed.out == ""
    for part in said:
        assert part in printed.err


def test_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["--devices", "2"]) == 1
    assert "needs a model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["20GB", "20", "GB/s", "0GB/s"])
def test_speeds_of_a_bus_that_cannot_be_read(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert plan_command([f"--host-speed={text}"]) == 1
    assert "speed" in capsys.readouterr().err


def test_weights_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for one device that has room for no more than two layers, which may not be there."""
    arguments = ["--config", configured(tmp_path), "--devices", "1", "--device-memory", "5KiB"]

    assert plan_command([*arguments, "--json"]) == 1
    lacking = json.loads(capsys.readouterr().out)
    assert plan_command([*arguments, "--weights", "host", "--host-speed", "1GB/s"]) == 0
    chosen = capsys.readouterr().out

    assert lacking["fitting"][0]["weights"] == "host"
    assert "weights='host'" in chosen


@pytest.mark.parametrize("text", ["24 Gib", "24", "GiB", "1.2.3GiB", "-1GiB"])
def test_sizes_that_cannot_be_read(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert plan_command([f"--device-memory={text}"]) == 1
    assert "must be a size such as 24GiB" in capsys.readouterr().err


def test_operations_for_layers_that_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--config {configured(tmp_path)} --devices 2 --device-speed 1TFLOPS".split()
    assert plan_command(arguments) == 1
    assert "Add --measure-on meta" in capsys.readouterr().err


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    arguments = f"--config {configured(tmp_path)} --devices 2 --plot {path}".split()
    assert plan_command(arguments) == (0 if can_draw() else 1)

    if can_draw():
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
@pytest.mark.parametrize("path", ["/none/plan.png", "plan.txt"])
def test_plot_that_cannot_be_written(capsys: pytest.CaptureFixture[str], path: str) -> None:
    """Once it was an error after the plan was made."""
    assert plan_command(["--config=none.yaml", "--plot", path]) == 1
    assert f"got '{path}'. Write plan.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, message",
    [
        ("--chunks 0", "chunks must be at least 1"),
        ("--chunks -4", "chunks must be at least 1"),
        ("--stages 0", "stages must be 1 or more: got 0"),
    ],
)
def test_numbers_that_are_not_positive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    assert plan_command(f"--config {configured(tmp_path)} --devices 2 {option}".split()) == 1
    assert message in capsys.readouterr().err


def test_option_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(f"--config {configured(tmp_path)} --device 2".split()) == 1
    assert "the lines above say what it does not" in capsys.readouterr().err
