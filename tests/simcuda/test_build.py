"""The library is built once, whole, and only for the torch that it is written for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.simcuda import build
from tests.simcuda.build import UnavailableError, library


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch of the right version, whatever this one is."""
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path / "torch")
    return tmp_path / "torch"


def compiler(write: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    return lambda torch, into: write(into)


def test_second_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[Path] = []

    def write(into: Path) -> None:
        built.append(into)
        into.touch()

    monkeypatch.setattr(build, "_compile", compiler(write))

    first, second = library(tmp_path / "env"), library(tmp_path / "env")

    assert first == second
    assert [*(tmp_path / "env").iterdir()] == [first]
    assert len(built) == 1


def test_changed_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(build, "_compile", compiler(Path.touch))
    before = library(tmp_path / "env")

    (tmp_path / "source" / "clock.hpp").write_text("// changed", encoding="utf-8")

    assert library(tmp_path / "env") != before


def test_two_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = Barrier(2, timeout=60)

    def write(into: Path) -> None:
        into.write_text("half", encoding="utf-8")
        both.wait()
        into.write_text("whole", encoding="utf-8")

    monkeypatch.setattr(build, "_compile", compiler(write))
    with ThreadPoolExecutor(2) as pool:
        paths = [*pool.map(library, [tmp_path / "env"] * 2)]

    assert paths[0] == paths[1]
    assert paths[0].read_text(encoding="utf-8") == "whole"
    assert [*(tmp_path / "env").iterdir()] == paths[:1]


def test_build_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        into.write_text("half", encoding="utf-8")
        raise UnavailableError("g++ could not build them")

    monkeypatch.setattr(build, "_compile", compiler(fail))

    with pytest.raises(UnavailableError, match="could not build"):
        library(tmp_path / "env")
    assert not [*(tmp_path / "env").iterdir()]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UnavailableError, match=r"no compiler: g\+\+ is not installed"):
        library(tmp_path / "env")


class TestTorch:
    """Which torch they are written for."""

    @pytest.fixture(autouse=True)
    def _undo(self, _torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()

    def test_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "version", lambda name: "2.8.0+cpu")

        with pytest.raises(UnavailableError, match=r"for torch 2.13.\*, this is torch 2.8.0"):
            build.torch_folder()
