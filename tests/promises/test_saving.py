"""Plain checkpoints: a save that fails or is killed leaves the last checkpoint intact."""

import errno
import os
import random
import resource
import shutil
import subprocess
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import settings
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.checkpoints import atomic_file as whole_files
from lightning_gpipe.checkpoints.atomic_file import AtomicFiles
from tests.support.interrupts import interrupted
from tests.support.kills import Calls, Moment
from tests.support.lightning_modules import Classifier, Data, fitted
from tests.support.processes import assert_equal
from tests.support.ranks import Failed, new_ranks

KILLS = 20 if settings().max_examples > 1000 else 4
NOBODY = 65534
NOTHING = nullcontext()
MEMORY = Path("/dev/shm")

OLD, NEW = 1.0, 2.0


def checkpoint(value: float, size: int = 40_000) -> dict[str, Any]:
    """What a Trainer may save: two tensors of some bytes each, and other things."""
    state = {name: torch.full((size,), value) for name in ("weight", "bias")}
    return {"pytorch-lightning_version": "2.6", "state_dict": state, "epoch": 3}


def save(path: Path, value: float) -> None:
    AtomicFiles().save_checkpoint(checkpoint(value), path)


def value_of(path: Path) -> float:
    """That of a checkpoint, which is read in whole."""
    found = AtomicFiles().load_checkpoint(path)
    (value,) = {each.unique().item() for each in found["state_dict"].values()}
    assert_equal(found, checkpoint(value))
    return value


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which is empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system, which is in memory."""
    if not MEMORY.is_dir() or MEMORY.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is no second file system: /dev/shm is none")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def left_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# Kills.


def save_until(path: Path, temporary: Path, last: Moment | None) -> int:
    """Save, until the process is killed or the end; how many calls were made."""
    tempfile.tempdir = str(temporary)
    calls = Calls(last)
    calls.during(partial(calls.saving(save), path, NEW))
    return calls.made["saving"]


def check_kills(path: Path, temporary: Path) -> None:
    """Kill a process that replaces a checkpoint, at drawn moments and before its place is taken."""
    with new_ranks(1) as ranks:
        (made,) = ranks.run(save_until, path.with_name("other"), temporary, None)
    draw = random.Random(0)
    found = []
    for k in range(KILLS):
        save(path, OLD)
        moment = Moment("saving", 1 + draw.randrange(made * k // KILLS, made * (k + 1) // KILLS))
        with new_ranks(1) as ranks:
            (outcome,) = ranks.outcomes(save_until, path, temporary, moment)
        assert isinstance(outcome, Failed), "it must be killed"
        found.append(value_of(path))
        assert left_in(temporary) == []

    assert set(found) <= {OLD, NEW}
    assert OLD in found
    save(path, NEW)  # by a run that goes on
    assert left_in(path.parent) == ["last.ckpt", "other"]


def test_kills_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    (temporary := tmp_path / "temporary").mkdir()

    check_kills(folder / "last.ckpt", temporary)


def test_kills_where_temporary_files_are_on_another_file_system(
    tmp_path: Path, elsewhere: Path
) -> None:
    """Once a checkpoint that replaced another was copied into its place from another disk."""
    check_kills(elsewhere / "last.ckpt", tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open file
def test_interrupt_at_any_line(tmp_path: Path) -> None:
    path, files = tmp_path / "last.ckpt", {whole_files.__file__}
    k, found = 0, []
    going_on = True
    while going_on:
        save(path, OLD)
        k += 1
        going_on = interrupted(partial(save, path, NEW), files, k)
        found.append(value_of(path))

    assert set(found) == {OLD, NEW}
    save(path, OLD)
    assert left_in(tmp_path) == ["last.ckpt"]


# A disk that is full, and a folder that is not ours.


def check_refused(
    path: Path, temporary: Path, why: int, limited: AbstractContextManager[None] = NOTHING
) -> None:
    """A save that replaces a checkpoint fails; it says why, and has no consequence."""
    before = path.read_bytes()

    with (
        pytest.raises(OSError, match=r"last.ckpt was not saved: .*The one that was there") as error,
        limited,
    ):
        save(path, NEW)

    assert error.value.errno == why
    assert os.strerror(why) in str(error.value)
    assert path.read_bytes() == before
    assert left_in(path.parent) == ["last.ckpt"]
    assert left_in(temporary) == []


@pytest.mark.parametrize("size", [0, 1000, 200_000, 320_000])
def test_file_that_may_not_grow(tmp_path: Path, temporary: Path, size: int) -> None:
    path = tmp_path / "run" / "last.ckpt"
    save(path, OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        check_refused(path, temporary, errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system for one checkpoint and a half."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(folder)], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("a file system of its own cannot be mounted here: RLIMIT_FSIZE stands for it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(small_disk: Path, temporary: Path) -> None:
    path = small_disk / "last.ckpt"
    save(path, OLD)

    check_refused(path, temporary, errno.ENOSPC)


@contextmanager
def without_rights() -> Iterator[None]:
    """Let permissions of files hold for root too: what they forbid to all, it may do else."""
    user = os.geteuid()
    if not user:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that any user may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with without_rights():
            reached = os.access(folder, os.X_OK, effective_ids=True)
        if not reached:
            pytest.skip(f"{folder.parent} must be open to all users: rights of root are not tested")
        yield folder


def test_folder_that_may_not_be_written(readable: Path, temporary: Path) -> None:
    """Once the test could not be run by root in a checkout that other users may not read."""
    path = readable / "last.ckpt"
    save(path, OLD)  # which imports all that another save needs
    readable.chmod(0o555)

    check_refused(path, temporary, errno.EACCES, without_rights())


def test_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    """Once what must hold was not said, for whether there is a checkpoint was not known either."""
    save(tmp_path / "run" / "last.ckpt", OLD)
    (tmp_path / "run").chmod(0o000)
    try:
        with pytest.raises(OSError, match=r"must let this process write"), without_rights():
            save(tmp_path / "run" / "last.ckpt", NEW)
    finally:
        (tmp_path / "run").chmod(0o755)


def test_first_checkpoint_in_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file", encoding="utf-8")

    with pytest.raises(OSError, match=r"run/last.ckpt was not saved: ") as error:
        save(tmp_path / "run" / "last.ckpt", NEW)

    assert "was there" not in str(error.value)


# What a file is made of, and what takes part in it.


def test_file_is_lightnings(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    TorchCheckpointIO().save_checkpoint(checkpoint(NEW), tmp_path / "a" / "last.ckpt")
    save(tmp_path / "b" / "last.ckpt", NEW)

    one, other = ((tmp_path / name / "last.ckpt") for name in "ab")
    assert other.read_bytes() == one.read_bytes()
    assert other.stat().st_mode == one.stat().st_mode


def test_memory_is_not_that_of_the_file(tmp_path: Path) -> None:
    """Lightning's file is in memory, whole, before it is written: 4 MB here."""
    one = checkpoint(NEW, size=500_000)

    tracemalloc.start()
    try:
        AtomicFiles().save_checkpoint(one, tmp_path / "last.ckpt")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    size = (tmp_path / "last.ckpt").stat().st_size
    assert most < size / 4


def test_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    save(tmp_path / "last.ckpt", OLD)
    one = {**checkpoint(NEW), "hyper_parameters": {"act": lambda x: x}}

    def raised(io: CheckpointIO) -> type[Exception]:
        with pytest.raises(Exception, match="pickle|local object") as error:
            io.save_checkpoint(one, tmp_path / "last.ckpt")
        return error.type

    assert raised(AtomicFiles()) is raised(TorchCheckpointIO())
    assert value_of(tmp_path / "last.ckpt") == OLD
    assert left_in(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("path", ["~/last.ckpt", "file://{}/last.ckpt"])
def test_path_as_lightning_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    AtomicFiles().save_checkpoint(checkpoint(NEW), path.format(tmp_path))

    assert value_of(tmp_path / "last.ckpt") == NEW
    assert left_in(tmp_path) == ["last.ckpt"]


def test_link_is_replaced_and_not_what_it_leads_to(tmp_path: Path) -> None:
    save(tmp_path / "best.ckpt", OLD)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")

    save(tmp_path / "last.ckpt", NEW)

    assert value_of(tmp_path / "best.ckpt") == OLD
    assert value_of(tmp_path / "last.ckpt") == NEW


def test_path_that_is_not_on_a_disk() -> None:
    AtomicFiles().save_checkpoint(checkpoint(NEW), "memory://folder/last.ckpt")
    try:
        assert_equal(AtomicFiles().load_checkpoint("memory://folder/last.ckpt"), checkpoint(NEW))
    finally:
        fsspec.filesystem("memory").rm("/folder", recursive=True)


class Recording(TorchCheckpointIO):
    """A user's own, which counts its saves."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved.append(Path(path).name)
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("wrap", [False, True])
def test_io_of_the_user(tmp_path: Path, wrap: bool) -> None:
    own = Recording()
    plugin = AsyncCheckpointIO(own) if wrap else own

    made = fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_epochs=1, plugins=[plugin])
    made.save_checkpoint(tmp_path / "end.ckpt")
    plugin.teardown()

    assert own.saved == ["end.ckpt"]
    made.validate(datamodule=Data(), ckpt_path=tmp_path / "end.ckpt", verbose=False)


class InMemory(CheckpointIO):
    """A user's own, which lists its calls, with the keys of the checkpoints."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._saved: dict[str, dict[str, Any]] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self.calls.append(("save", set(checkpoint) - {"lightning_gpipe"}, path, storage_options))
        self._saved[str(path)] = checkpoint

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(("load", path, args, options))
        return self._saved[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", path))

    def teardown(self) -> None:
        self.calls.append("teardown")


def calls_of(root: Path, strategy: Any, devices: int) -> list[Any]:
    """The calls of a fit, of saves with options, and of a fit that goes on."""
    io = InMemory()
    options: dict[str, Any] = {"devices": devices, "plugins": [io], "enable_checkpointing": True}
    each = ModelCheckpoint(root, "{epoch}", save_top_k=1)
    made = fitted(root, strategy, callbacks=[each], max_epochs=2, **options)
    made.save_checkpoint(root / "end.ckpt", storage_options={"retries": 3})
    made.save_checkpoint("s3://bucket/weights.ckpt", weights_only=True, storage_options=b"key")
    made.strategy.remove_checkpoint("s3://bucket/weights.ckpt")
    made.fit(Classifier(), datamodule=Data(), ckpt_path=root / "end.ckpt")
    return io.calls


def test_io_of_the_user_is_called_as_in_a_plain_trainer(tmp_path: Path) -> None:
    expected = calls_of(tmp_path, "auto", 1)

    found = calls_of(tmp_path, GPipeStrategy([3, 3]), 2)

    assert found == expected
    assert {"retries": 3} in [call[-1] for call in found]


def test_storage_options_without_an_io_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the error named WholeFiles, which no user has written anywhere.

    And Lightning's plugin, in its place, got the options without their name.
    """
    seen: list[dict[str, Any]] = []
    made = fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_epochs=1)

    with pytest.raises(TypeError, match="`storage_options` arg is not supported for `TorchCheckp"):
        made.save_checkpoint(tmp_path / "end.ckpt", storage_options="key")
    with monkeypatch.context() as patched:
        patched.setattr(
            TorchCheckpointIO, "save_checkpoint", lambda *_, **options: seen.append(options)
        )
        made.save_checkpoint(tmp_path / "end.ckpt", storage_options="key")

    assert seen == [{"storage_options": "key"}]
    assert left_in(tmp_path) == []


def test_asynchronous_save(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO()
    made = fitted(tmp_path, GPipeStrategy([3, 3]), devices=2, max_epochs=1, plugins=[plugin])

    made.save_checkpoint(tmp_path / "end.ckpt")
    plugin.teardown()

    assert isinstance(plugin.checkpoint_io, AtomicFiles)
    assert left_in(tmp_path) == ["end.ckpt"]
    made.validate(datamodule=Data(), ckpt_path=tmp_path / "end.ckpt", verbose=False)


def test_file_in_the_place_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1}
    in_parts = GPipeStrategy([3, 3], save_distributed_checkpoint=True)
    path = tmp_path / "last.ckpt"
    fitted(tmp_path, in_parts, **options).save_checkpoint(path)
    made = fitted(tmp_path, GPipeStrategy([3, 3]), **options)

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="was not saved: full"):
        made.save_checkpoint(path)
    monkeypatch.undo()
    assert path.is_dir()
    made.save_checkpoint(path)

    assert path.is_file()
    assert left_in(tmp_path) == ["last.ckpt"]
