"""``check`` says how a model would run as a pipeline, or what stands in the way."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not among our extras
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.commands.check import check, listing
from tests.support.processes import processes
from tests.support.ranks import Pool

pytestmark = pytest.mark.usefixtures("lightning_cli")

HERE = "tests.commands.test_check"


class Residual(nn.Module):
    """Traced; subtracts a mean over rows if asked to."""

    def __init__(self, width: int = 4, across: bool = False) -> None:
        super().__init__()
        self.across = across
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        if self.across:
            y = y - y.mean(0)
        return self.third(self.second(y).relu() + y)


class Blocks(nn.Module):
    """Tokens, and blocks in a loop that ends early if asked to."""

    def __init__(self, last: int = 4) -> None:
        super().__init__()
        self.last = last
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[: self.last]:
            x = block(x).tanh()
        return x


def test_traced_model(capsys: pytest.CaptureFixture[str]) -> None:
    code = check([f"{HERE}.Residual", "--init.width=8", "--stages=3", "--input=4"])

    assert code == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "stage 0: first, 40 parameters",
        "stage 1: second, 72 parameters",
        "stage 2: third, 36 parameters",
    ]


def test_model_that_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{HERE}.Residual", "--balance=['third']"]) == 0

    found = capsys.readouterr().out
    assert "stage 0: first..second, 40 parameters" in found
    assert "It was not run. Give --input" in found


def test_blocks_in_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    model = [f"{HERE}.Blocks", "--module=blocks", "--balance=[2, 2]", "--input=5", "--below=11"]

    assert check(model) == 0
    assert "stage 1: blocks.2..3, 144 parameters" in capsys.readouterr().out


def test_what_stands_in_the_way_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{HERE}.Residual", "--init.across=true"]) == 1

    found = capsys.readouterr().out
    assert re.search(r"across the rows .*test_check.py:\d+ computes mean along dim 0", found)


class Steps(LightningModule):
    """Has no forward: its steps call the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def test_lightning_module_without_forward(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the README raised a NotImplementedError."""
    assert check([f"{HERE}.Steps", "--module=layers", "--input=4"]) == 0

    first, second, training, evaluation = capsys.readouterr().out.splitlines()
    assert (first, second) == (
        "stage 0: layers 0..1, 20 parameters",
        "stage 1: layer 2, 10 parameters",
    )
    assert training.startswith("in training, verified: ")
    assert evaluation.startswith("in evaluation, verified: ")


@pytest.mark.parametrize("options", [[], ["--input=4"], ["--module=blocks", "--input=4"]])
def test_forward_that_is_missing(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert check([f"{HERE}.Steps", *options]) == 1

    found = capsys.readouterr().out
    assert "a model that is checked must have a forward: got Steps" in found
    ways = "--config file.yaml, to run a batch of its data, or --module layers, to call it with"
    assert f"Write {ways} the input." in found


@pytest.mark.parametrize(
    "options, message",
    [
        (["--balance=[]"], "at least one stage: got balance=[]"),
        (["--stages=0"], "--stages must be 1 or more: got 0"),
        (["--balance=[1, 2]", "--stages=3"], "of as many stages: got 3 and 2"),
        (["--input=4x4"], "--input must be sizes of a row of input, as 3,64,64"),
        (["--input="], "--input must be sizes of a row of input, as 3,64,64"),
    ],
)
def test_values_of_a_wrong_form(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert check([f"{HERE}.Residual", *options]) == 1

    assert message in capsys.readouterr().out.splitlines()[-1]


def test_blocks_of_a_lightning_module_without_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{HERE}.Steps", "--module=blocks"]) == 0

    assert "stage 1: blocks.1, 20 parameters" in capsys.readouterr().out


TRANSFORMER = ["torch.nn.Transformer", "--stages=2"]
SMALL = '--init={"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0, "batch_first": %s}'


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_model_of_two_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    small = SMALL % "true"

    assert check([*TRANSFORMER, small, "--module=decoder.layers", "--input=5,8 3,8"]) == 0

    *_, training, evaluation = capsys.readouterr().out.splitlines()
    assert training.startswith("in training, verified: ")
    assert evaluation.startswith("in evaluation, verified: ")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    "batch_first, given, message",
    [
        ("true", "--input=5,8", "TypeError: .*missing 1 required positional argument: 'tgt'"),
        ("false", "--input=5,8 5,8", "Doubt: it must be clear .*: got memory of shape"),
        ("true", "--input=5,9 3,9", "RuntimeError: .*must be equal to d_model"),
    ],
)
def test_last_line_says_what_stands_in_the_way(
    capsys: pytest.CaptureFixture[str], batch_first: str, given: str, message: str
) -> None:
    assert check([*TRANSFORMER, SMALL % batch_first, given]) == 1

    assert re.match(message, capsys.readouterr().out.splitlines()[-1])


def test_error_of_any_type_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["torch.nn.Transformer", "--init.nhead=7"]) == 1

    assert "AssertionError: embed_dim must be divisible by num_heads" in capsys.readouterr().out


def test_what_stands_in_the_way_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = check([f"{HERE}.Blocks", "--init.last=3", "--module=blocks", "--input=5", "--below=11"])

    assert code == 1
    assert "never calls the last blocks" in capsys.readouterr().out


def configured(folder: Path, **strategy: Any) -> str:
    """The path of a configuration."""
    values = {
        "trainer": {
            "accelerator": "gpu",  # which is not needed for a check
            "devices": 2,
            "strategy": {"class_path": "lightning_gpipe.GPipeStrategy", "init_args": strategy},
            "default_root_dir": str(folder),
        },
        "model": {"class_path": "tests.support.lightning_modules.Classifier"},
        "data": {"class_path": "tests.support.lightning_modules.Data"},
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def test_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path, balance=[2, 4], chunks=2)
    monkeypatch.setattr(sys, "argv", ["lightning_gpipe", "check", "--config", path])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_gpipe", run_name="__main__", alter_sys=True)

    assert ended.value.code == 0
    found = capsys.readouterr().out
    assert "stage 0: layers 0..1, " in found
    assert "A batch was trained" in found
    assert not list(tmp_path.glob("*/"))


@pytest.mark.launches
@pytest.mark.parametrize(
    "devices, strategy", [(2, {"processes": "per_stage"}), (4, {"replicas": 2})]
)
def test_configuration_with_several_processes(
    tmp_path: Path, devices: int, strategy: dict[str, Any]
) -> None:
    """Once the second process printed the help of the command, and the first waited for it."""
    path = configured(tmp_path, balance=[2, 4], chunks=2, **strategy)
    command = [sys.executable, "-m", "lightning_gpipe", "check", "--config", path]

    ended = subprocess.run(
        [*command, f"--trainer.devices={devices}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )

    assert ended.stdout.count("stage 1: layers 2..5, ") == 1
    assert ended.stdout.count("A batch was trained") == 1
    assert "args parameter" not in ended.stderr


def listed() -> str:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    with closing(GPipe(layers, [1, 2], devices=["cpu", "cpu"], **processes((0, 1)))) as pipeline:
        return listing(pipeline)


def test_listing_has_the_stages_of_all_processes(two_ranks: Pool) -> None:
    """Once each process listed its own stages, and the second one called its own stage 0."""
    expected = "stage 0: layer 0, 9 parameters\nstage 1: layers 1..2, 8 parameters"

    assert two_ranks.run(listed) == [expected] * 2


def test_configuration_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(["--config", configured(tmp_path, balance=[2, 2], chunks=2)]) == 1
    assert "balance must add up" in capsys.readouterr().out


def test_configuration_without_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = check(
        ["--config", configured(tmp_path), "--trainer.strategy=auto", "--trainer.devices=1"]
    )

    assert code == 1
    assert "trainer.strategy must be a pipeline" in capsys.readouterr().out
