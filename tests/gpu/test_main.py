"""``make test-nccl`` says what it needs, and runs the tests where all of it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu import __main__ as nccl


@pytest.mark.parametrize(
    "simulated, available, gpus, text",
    [
        ("4", True, 4, "real GPUs: SIMULATED_GPUS is set"),
        (None, False, 4, f"torch with NCCL: this is torch {torch.__version__}"),
        (None, True, 1, "two GPUs: found 1"),
    ],
)
def test_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    simulated: str | None,
    available: bool,
    gpus: int,
    text: str,
) -> None:
    monkeypatch.delenv("SIMULATED_GPUS", raising=False)
    if simulated is not None:
        monkeypatch.setenv("SIMULATED_GPUS", simulated)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    assert nccl.main() == 0
    assert capsys.readouterr().out == f"skipped, because processes over NCCL need {text}\n"


def test_tests_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(arguments: list[str]) -> int:
        ran.extend(arguments)
        return 3

    monkeypatch.setattr(nccl, "missing", str)
    monkeypatch.setattr(pytest, "main", run)

    assert nccl.main() == 3
    assert [Path(name).is_file() for name in ran[2:]] == [True, True]
