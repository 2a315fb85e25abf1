"""Training from a configuration file, where the pipeline is three lines of YAML."""

from __future__ import annotations

import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are not among our extras
from lightning.pytorch.cli import LightningCLI

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.commands.fit import main
from tests.support.lightning_modules import assert_same_weights, fitted

pytestmark = pytest.mark.usefixtures("lightning_cli")

STRATEGY = {
    "class_path": "lightning_gpipe.GPipeStrategy",
    "init_args": {"balance": [2, 4], "chunks": 3, "activation_checkpointing": "always"},
}


def config(root: Path, strategy: Any, **trainer: Any) -> str:
    """The path of a configuration; what it trains is what ``fitted`` trains."""
    values = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": strategy,
            "max_epochs": 3,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": str(root),
            **trainer,
        },
        "model": {"class_path": "tests.support.lightning_modules.Classifier"},
        "data": {"class_path": "tests.support.lightning_modules.Data"},
    }
    path = root / "train.yaml"  # not config.yaml, which Lightning writes
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def strategy_of(cli: LightningCLI) -> GPipeStrategy:
    assert isinstance(cli.trainer.strategy, GPipeStrategy)
    return cli.trainer.strategy


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which the strategy was made last."""
    arguments: dict[str, Any] = {}
    original = GPipeStrategy.setup

    def setup(self: GPipeStrategy, trainer: Any) -> None:
        original(self, trainer)
        pipeline = self.pipeline
        assert pipeline is not None
        arguments.update(
            balance=pipeline.balance,
            chunks=pipeline.chunks,
            mode=pipeline.activation_checkpointing,
            microbatching=str(pipeline.microbatching),
        )

    monkeypatch.setattr(GPipeStrategy, "setup", setup)
    return arguments


def test_class_path(tmp_path: Path, seen: dict[str, Any]) -> None:
    cli = LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        args=["fit", "--config", config(tmp_path, STRATEGY)],
    )

    rows = "Rows(at_least=1)"
    assert seen == {"balance": [2, 4], "chunks": 3, "mode": "always", "microbatching": rows}
    assert_same_weights(cli.trainer, fitted(tmp_path))


def test_schedule(tmp_path: Path) -> None:
    init_args = {"balance": [2, 4], "chunks": 3, "schedule": "1f1b", "split_backward": True}
    strategy = {"class_path": STRATEGY["class_path"], "init_args": init_args}

    cli = main(["fit", "--config", config(tmp_path, strategy)])

    assert "schedule='1f1b', split_backward=True" in repr(strategy_of(cli))
    assert_same_weights(cli.trainer, fitted(tmp_path))


def test_schedule_that_is_a_block(tmp_path: Path) -> None:
    init_args = {"balance": [2, 4], "chunks": 3, "schedule": [[0, 3], [1, 2]]}
    strategy = {"class_path": STRATEGY["class_path"], "init_args": init_args}

    cli = main(["fit", "--config", config(tmp_path, strategy)])

    assert "schedule=((0, 3), (1, 2))" in repr(strategy_of(cli))
    assert_same_weights(cli.trainer, fitted(tmp_path))


def test_schedule_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(tmp_path, STRATEGY), "--trainer.strategy.schedule=2f2b"])

    assert "zero_bubble" in capsys.readouterr().err


def test_name(tmp_path: Path, seen: dict[str, Any]) -> None:
    cli = main(["fit", "--config", config(tmp_path, "gpipe")])

    assert strategy_of(cli).strategy_name == "gpipe"
    assert (len(seen["balance"]), seen["chunks"], seen["mode"]) == (2, 8, "except_last")
    assert_same_weights(cli.trainer, fitted(tmp_path))


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"dim": 1, "output_dim": 0}, "Rows(at_least=1, dim=1, output_dim=0)"),
        ({"dim": {"x": 1}}, "Rows(at_least=1, dim={'x': 1})"),
        ({"dim": {0: 1}}, "Rows(at_least=1, dim={0: 1})"),
    ],
)
def test_way_to_split(
    tmp_path: Path, seen: dict[str, Any], arguments: dict[str, Any], name: str
) -> None:
    rows = {"class_path": "lightning_gpipe.Rows", "init_args": arguments}
    init_args = {"balance": [2, 4], "chunks": 1, "microbatching": rows}
    strategy = {"class_path": STRATEGY["class_path"], "init_args": init_args}

    with suppress(ValueError):  # the model has its rows in dim 0
        main(["fit", "--config", config(tmp_path, strategy, fast_dev_run=True)])

    assert seen["microbatching"] == name


def test_several_modules(tmp_path: Path) -> None:
    init_args = {
        "module": ["layers.encoder", "layers.decoder"],
        "balance": [[1, 2], [2, 2]],
        "around": "first",
    }
    strategy = {"class_path": STRATEGY["class_path"], "init_args": init_args}
    path = Path(config(tmp_path, strategy, fast_dev_run=True))
    text = path.read_text("utf-8").replace("lightning_modules.Classifier", "two_stacks.Translator")
    path.write_text(text, encoding="utf-8")

    cli = main(["fit", "--config", str(path)])

    assert "[[1, 2], [2, 2]]" in repr(strategy_of(cli))


def test_argument_on_the_command_line(tmp_path: Path, seen: dict[str, Any]) -> None:
    main(
        [
            "fit",
            f"--config={config(tmp_path, STRATEGY, fast_dev_run=True)}",
            "--trainer.strategy.chunks=5",
            "--trainer.strategy.activation_checkpointing=[2, 0]",
        ]
    )

    assert (seen["balance"], seen["chunks"], seen["mode"]) == ([2, 4], 5, [2, 0])


def test_strategy_on_the_command_line(tmp_path: Path, seen: dict[str, Any]) -> None:
    main(
        [
            "fit",
            f"--config={config(tmp_path, 'auto', fast_dev_run=True)}",
            "--trainer.strategy=lightning_gpipe.GPipeStrategy",
            "--trainer.strategy.balance=[1, 5]",
        ]
    )

    assert seen["balance"] == [1, 5]


@pytest.mark.parametrize("nested", ["--trainer.strategy.chunks=5", "--trainer.strategy.chunks 5"])
def test_argument_after_a_class(tmp_path: Path, seen: dict[str, Any], nested: str) -> None:
    path = config(tmp_path, "lightning_gpipe.GPipeStrategy", fast_dev_run=True)

    main(["fit", "--config", path, *nested.split()])

    assert (len(seen["balance"]), seen["chunks"]) == (2, 5)


@pytest.mark.parametrize(
    "strategy, arguments",
    [
        ({"class_path": "GPipeStrategy", "init_args": {"chunks": 5}}, []),
        ("gpipe", ["--trainer.strategy=GPipeStrategy", "--trainer.strategy.chunks=5"]),
    ],
    ids=["in the file", "on the command line"],
)
def test_class_without_its_package(
    tmp_path: Path, seen: dict[str, Any], strategy: Any, arguments: list[str]
) -> None:
    main(["fit", "--config", config(tmp_path, strategy, fast_dev_run=True), *arguments])

    assert seen["chunks"] == 5


@pytest.mark.parametrize(
    "strategy, arguments",
    [
        ("gpipe", ["--trainer.strategy.chunks=5"]),
        ({"class_path": "gpipe", "init_args": {"chunks": 5}}, []),
    ],
    ids=["on the command line", "in the file"],
)
def test_name_with_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any, arguments: list[str]
) -> None:
    """The guide and the page of errors say what to write: the class takes options."""
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(tmp_path, strategy), *arguments])

    message = capsys.readouterr().err
    assert "trainer.strategy" in message and "gpipe" in message


def test_class_in_the_place_of_the_name_on_the_command_line(
    tmp_path: Path, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, "gpipe", fast_dev_run=True)
    strategy = "--trainer.strategy=lightning_gpipe.GPipeStrategy --trainer.strategy.chunks=5"
    monkeypatch.setattr(sys, "argv", f"gpipe fit --config={path} {strategy}".split())

    main()

    assert seen["chunks"] == 5


@pytest.mark.parametrize(
    "argument, value",
    [("chunk", 3), ("balance", "halves"), ("chunks", "many"), ("activation_checkpointing", 1.5)],
)
def test_wrong_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, value: Any
) -> None:
    strategy = {"class_path": STRATEGY["class_path"], "init_args": {argument: value}}

    with pytest.raises(SystemExit):
        main(["fit", "--config", config(tmp_path, strategy)])

    message = capsys.readouterr().err
    assert f"'{argument}'" in message or f'"{argument}"' in message


def test_saved_configuration_trains_again(tmp_path: Path, seen: dict[str, Any]) -> None:
    again = tmp_path / "again"
    main(["fit", "--config", config(tmp_path, STRATEGY, max_epochs=1, logger=True)])
    first = dict(seen)
    (saved,) = tmp_path.glob("lightning_logs/*/config.yaml")
    seen.clear()

    main(["fit", "--config", str(saved), f"--trainer.default_root_dir={again}"])

    assert yaml.safe_load(saved.read_text("utf-8"))["trainer"]["strategy"]["init_args"] == {
        **STRATEGY["init_args"],  # type: ignore[dict-item]  # the dictionary's values are mixed
        "module": None,
        "outputs": "auto",
        "deferred_batch_norm": True,
        "microbatching": None,
        "compile": False,
        "threads": "auto",
        "cores": None,
        "schedule": "fill_drain",
        "split_backward": False,
        "verify": "sample",
        "around": "last",
        "weights": "device",
        "offload_activations": False,
        "processes": "single",
        "timeout": "0:30:00",
        "lost_after": None,
        "process_group_backend": None,
        "start_method": "popen",
        "replicas": 1,
        "tensor_parallel": 1,
        "ddp": None,
        "sharding": None,
        "save_distributed_checkpoint": False,
    }
    assert seen == first
    (resaved,) = again.glob("lightning_logs/*/config.yaml")
    one, other = (yaml.safe_load(path.read_text("utf-8")) for path in (saved, resaved))
    assert one["trainer"].pop("default_root_dir") != other["trainer"].pop("default_root_dir")
    assert one == other


def test_module_of_the_package_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning_gpipe", "fit", "--print_config"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_gpipe", run_name="__main__", alter_sys=True)

    assert ended.value.code in (None, 0)
    assert "strategy: auto" in capsys.readouterr().out
