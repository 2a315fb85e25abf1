"""The benchmark counts what is there; its figures do not depend on the machine."""

import pytest

from benchmarks import saved_bytes
from benchmarks.harness import options
from benchmarks.saved_bytes import WAYS, counted

SMALL = {"devices": 3, "chunks": 6, "rows": 2, "width": 8, "classes": 64}
ALIVE = {
    "fill-drain": [6, 6, 6],
    "fill-drain, except_last": [1, 1, 1],
    "1F1B": [3, 2, 1],
    "1F1B, W": [3, 2, 1],
    "zero bubble": [3, 3, 3],
}


@pytest.mark.parametrize("trained", [True, False])
def test_micro_batches_alive(trained: bool) -> None:
    given = options("saved_bytes", "", rounds=1, argv=[], **SMALL)
    found = {way.name: counted(given, way, trained=trained) for way in WAYS}

    assert {name: found[name].alive for name in ALIVE} == ALIVE
    one = found["1F1B"].caller
    assert one < found["zero bubble"].caller < 2 * one
    assert found["fill-drain"].caller > 5 * one


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    saved_bytes.main([f"--{name}={value}" for name, value in SMALL.items()])

    report = capsys.readouterr().out
    for way in WAYS:
        assert f"embedding trained, {way.name}" in report
