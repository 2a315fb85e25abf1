"""The benchmark runs; what it measures is not for a test to judge."""

import pytest

pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

from benchmarks import pretrained


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    pretrained.main(["--blocks", "4", "--width", "64"])

    report = capsys.readouterr().out
    for way in pretrained.WAYS:
        assert f"{way}: peak of the host's memory" in report
