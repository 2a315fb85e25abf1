"""The command line by itself, before any of its commands."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str]) -> None:
    ended = run(*arguments)

    assert ended.returncode == 0
    for name in ("fit", "validate", "test", "predict", "check", "plan"):
        assert name in ended.stdout


@pytest.mark.parametrize("name", ["check", "plan"])
def test_command_alone_says_what_it_takes(name: str) -> None:
    ended = run(name)

    assert ended.returncode == 0
    assert "--config" in ended.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_gpipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
