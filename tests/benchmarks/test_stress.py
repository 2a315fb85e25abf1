"""Promise: the stress run draws what it says, sees a wrong number, and fails when there is one."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import stress, stressed
from benchmarks.harness.options import Options
from benchmarks.stressed import Case


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Leave torch as it was."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def given(steps: int = 4, sanitizer: int = 0) -> Options:
    return Options(steps=steps, seed=0, sanitizer=sanitizer)


def case(**more: object) -> Case:
    layers = ("convolution", "keep", "tied", "batch norm", "join", "tied", "convolution")
    values = {"deferred": False, "side_stream": False, "chunks": 3, "mode": "always", "seed": 1}
    return Case(layers=layers, balance=(2, 3, 2), devices=("cpu",) * 3, **(values | more))  # type: ignore[arg-type]  # as the test likes


# What is drawn.


def test_same_seed_same_case() -> None:
    assert stressed.draw(5, "cpu") == stressed.draw(5, "cpu") != stressed.draw(6, "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_are_of_all_sorts(device: str) -> None:
    cases = [stressed.draw(seed, device) for seed in range(300)]

    assert {len(each.balance) for each in cases} == {1, 2, 3, 4}
    assert {each.mode for each in cases} == set(stressed.MODES)
    assert {each.deferred for each in cases} == {True, False}
    assert {word for each in cases for word in each.layers} == set(stressed.LAYERS)
    assert {each.side_stream for each in cases} == ({False} if device == "cpu" else {True, False})
    assert any(len(set(each.devices)) > 1 for each in cases) == (device == "cuda")
    for each in cases:
        assert sum(each.balance) == len(each.layers)
        assert len(each.balance) % len(each.devices) == 0
        assert each.layers.count("keep") == each.layers.count("join")


def test_tied_layers_have_one_weight() -> None:
    module = case().build()

    assert module[2].weight is module[5].weight
    assert module[0].weight is not module[6].weight


# What is compared.


def test_everything_is_compared_and_agrees() -> None:
    found = list(stressed.run(case(), 3))

    assert max(each.relative for each in found) <= stress.TOLERANCE
    assert {each.step for each in found} == {0, 1, 2}
    names = {each.name for each in found}
    parameters = dict(case().build().named_parameters())
    assert names >= {f"gradient of {name}" for name in parameters} | parameters.keys()
    assert names >= {"gradient of the input", "3.running_mean", "3.running_var"}


def test_deferred_statistics_are_not_compared() -> None:
    names = {each.name for each in stressed.run(case(deferred=True), 1)}

    assert "3.running_mean" not in names and "gradient of 3.weight" in names


@pytest.mark.parametrize("wrong", [1e-6, float("nan")])
def test_wrong_gradient_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: float
) -> None:
    monkeypatch.setattr(stressed, "pipelined", _altered(stressed.pipelined, wrong))

    found = stress.steps("cpu", 1, 0)

    assert found.different > 0
    assert "gradient of" in capsys.readouterr().out


def _altered(real, wrong: float):
    def pipelined(*args):
        for made in real(*args):
            made["gradient of 0.weight"][0] += wrong
            yield made

    return pipelined


# The run.


def test_part_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    stress.main(["--inside", "cpu", "--steps", "11"])

    found = stress.Found(**json.loads(capsys.readouterr().out))
    assert (found.steps, found.models, found.different) == (11, 2, 0)
    assert found.compared > 100


def test_run_in_a_process_overwrites_freed_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("runs on the GPU, where there is one")
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # another malloc takes no orders of glibc's

    stress.main(["--steps", "4"])

    out = capsys.readouterr().out
    report = json.loads(out[out.index("\n{\n") :])
    assert report["rows"][0]["steps"] == "4"
    assert report["targets"][0]["met"]
    if platform.libc_ver()[0] == "glibc":
        assert report["notes"] == []  # or there were no NaNs in freed memory


def test_process_that_dies_is_a_difference(capfd: pytest.CaptureFixture[str]) -> None:
    found = stress.in_a_process([sys.executable, "-c", "import os; os.abort()"], {})

    assert found.different > 0
    assert "exit code -6" in capfd.readouterr().err


def test_difference_ends_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "in_a_process", lambda *_: stress.Found(different=1))

    with pytest.raises(SystemExit) as ended:
        stress.main(["--steps", "1"])

    assert ended.value.code == 1


@pytest.mark.parametrize("tool", [None, "/bin/compute-sanitizer"])
def test_parts_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tool: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda _: tool)

    found = {name: (command, env) for name, command, env in stress.parts(given(9, sanitizer=3))}

    assert [name for name in found if name != "compute-sanitizer memcheck"] == [
        "freed memory is taken",
        "no caching allocator",
    ]
    assert found["freed memory is taken"][0][-3:] == ["--inside=cuda", "--steps=7", "--seed=0"]
    assert found["no caching allocator"][0][-2:] == ["--steps=2", "--seed=1"]
    assert found["no caching allocator"][1]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert ("compute-sanitizer memcheck" in found) == (tool is not None)
