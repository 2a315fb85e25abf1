"""The benchmark runs; a test judges of what it finds only that nothing is compiled twice."""

import json

import pytest

from benchmarks import compilation
from benchmarks.harness import options
from tests.support.compilation import can_compile

pytestmark = [
    pytest.mark.skipif(not can_compile(), reason="needs torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile looks
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]


@pytest.mark.parametrize("threads", ["true", "auto"])
def test_small_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setattr(compilation, "MODELS", {"small": compilation.small_operators})
    monkeypatch.setattr(compilation, "starts", lambda *_: [2.0, 1.0])
    small = "--rounds 2 --small-blocks 2 --width 4 --batch-size 13 --chunks 2 --backend eager"

    compilation.main([*small.split(), "--threads", threads])

    report = capsys.readouterr().out
    for row in ("small, as it is", "small, layers compiled", "small, stages compiled / layers"):
        assert row in report or row.replace("small, ", "small: ") in report
    again = json.loads(report[report.index("\n{\n") :])["targets"][0]
    assert (again["found"], again["met"]) == (0, True)


def test_starts_are_those_of_new_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    given = options("compilation", "", rounds=1, argv=[], **SMALL)

    found = compilation.starts(
        given, "small operators", compilation.LAYERS, str(tmp_path_factory.mktemp("cache"))
    )

    assert len(found) == 2 and min(found) > 0


SMALL = {
    "small_blocks": 2,
    "width": 4,
    "batch_size": 13,
    "chunks": 2,
    "threads": "false",
    "backend": "eager",
}
