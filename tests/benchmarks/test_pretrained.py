"""The benchmark runs; what it measures is not for a test to judge."""

import io
import subprocess
from contextlib import redirect_stdout
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

from benchmarks import pretrained

run = subprocess.run


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What the command would print; a process of its own matters to the figures only."""
    if command[1:3] != ["-m", "benchmarks.pretrained"]:
        return run(command, **options)
    with redirect_stdout(io.StringIO()) as printed:
        pretrained.main(command[3:])
    return subprocess.CompletedProcess(command, 0, stdout=printed.getvalue())


def test_small_run_prints_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", in_this_process)

    pretrained.main(["--blocks", "4", "--width", "64"])

    report = capsys.readouterr().out
    for way in pretrained.WAYS:
        assert f"{way}: peak of the host's memory" in report
