"""The command line by itself, before any of its commands."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_gpipe.commands import run


@pytest.fixture(autouse=True)
def _other_tests_find_their_garbage() -> Iterator[None]:
    yield
    gc.unfreeze()


COMMANDS = ("fit", "validate", "test", "predict", "check", "plan")


def test_module_lists_every_command() -> None:
    command = [sys.executable, "-m", "lightning_gpipe"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)

    assert all(name in ended.stdout for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-gpipe", *arguments])

    run()

    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_console_script_finds_modules_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lightning-gpipe fit`` once knew no ``class_path: model.Classifier``; ``python -m`` did."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-gpipe", "--help"])
    monkeypatch.setattr(sys, "path", ["/somewhere/bin"])

    run()
    run()

    assert sys.path == [str(tmp_path), "/somewhere/bin"]


@pytest.mark.parametrize("name", ["check", "plan"])
def test_command_alone_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-gpipe", name])

    with pytest.raises(SystemExit) as ended:
        run()

    assert not ended.value.code
    assert "--config" in capsys.readouterr().out


def test_command_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI listed its own commands only."""
    monkeypatch.setattr(sys, "argv", ["lightning-gpipe", "plam"])

    with pytest.raises(SystemExit, match="fit, validate, test, predict, check, plan: got plam"):
        run()
