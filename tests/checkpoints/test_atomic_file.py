"""Plain checkpoints: an error names a file that is not a checkpoint."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipeStrategy
from tests.support.lightning_modules import Classifier, Data, fitted, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What is in the file of a checkpoint."""
    path = tmp_path_factory.mktemp("whole") / "end.ckpt"
    fitted(path.parent, GPipeStrategy([3, 3]), devices=2, max_epochs=1).save_checkpoint(path)
    return path.read_bytes()


def error_of(folder: Path, content: bytes) -> tuple[BaseException, Path]:
    """The error of a fit that is to go on from a file with this content."""
    path = folder / "last.ckpt"
    path.write_bytes(content)
    made = trainer(folder, GPipeStrategy([3, 3]), devices=2)
    with pytest.raises(Exception) as error:
        made.fit(Classifier(), datamodule=Data(), ckpt_path=path)
    return error.value, path


def assert_noted(error: BaseException, path: Path) -> None:
    [note] = error.__notes__
    assert note.startswith(f"raised while the checkpoint {path} was read, which must be a whole")


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("word/document.xml", "<xml>")
    return file.getvalue()


WEIGHTS = dict(nn.Linear(2, 2).state_dict())
OLD_FORMAT = {"_use_new_zipfile_serialization": False}


WAYS = pytest.mark.parametrize("way", ["WEIGHTS_ONLY", "NO_WEIGHTS_ONLY"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"epoch: 1\n",
        bytes(100),
        archive(),
        saved(WEIGHTS, **OLD_FORMAT)[:100],
    ],
    ids=["empty", "text", "zeros", "document", "half of an old format"],
)
@WAYS
@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, way: str
) -> None:
    """PyTorch's error alone does not name the file, as ``EOFError: Ran out of input``."""
    monkeypatch.setenv(f"TORCH_FORCE_{way}_LOAD", "1")

    assert_noted(*error_of(tmp_path, content))


@pytest.mark.parametrize(
    "content, cause",
    [
        (saved(WEIGHTS), "got a dict with 'weight', 'bias'. Weights alone are for "),
        (saved(WEIGHTS, **OLD_FORMAT), "got a dict with 'weight', 'bias'. Weights alone are for "),
        (saved(dict.fromkeys("abcdef", 1)), "got a dict with 'a', 'b', 'c', 'd' and 2 more. "),
        (saved({}), "got a dict with nothing. "),
        (saved(torch.ones(3)), "got a Tensor. "),
    ],
    ids=["weights", "weights in an old format", "another dict", "an empty dict", "tensor"],
)
@WAYS
@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_file_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, cause: str, way: str
) -> None:
    monkeypatch.setenv(f"TORCH_FORCE_{way}_LOAD", "1")

    error, path = error_of(tmp_path, content)

    assert str(error).startswith(f"the checkpoint {path} must be ") and cause in str(error)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_file_without_its_end(tmp_path: Path, whole: bytes, share: float) -> None:
    assert_noted(*error_of(tmp_path, whole[: int(share * len(whole))]))


class Own:
    """A class that the safe loader does not know."""


def test_error_of_a_file_that_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "last.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.0", "own": Own()}, path)
    made = trainer(tmp_path, GPipeStrategy([3, 3]), devices=2)

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        made.validate(Classifier(), datamodule=Data(), ckpt_path=path)


def test_file_that_is_missing(tmp_path: Path) -> None:
    made = trainer(tmp_path, GPipeStrategy([3, 3]), devices=2)

    with pytest.raises(FileNotFoundError, match=r"no.ckpt"):
        made.validate(Classifier(), datamodule=Data(), ckpt_path=tmp_path / "no.ckpt")


def test_folder_of_parts_whose_rest_is_empty(tmp_path: Path) -> None:
    strategy = GPipeStrategy([3, 3], save_distributed_checkpoint=True)
    path = tmp_path / "last.ckpt"
    fitted(tmp_path, strategy, devices=2, max_epochs=1).save_checkpoint(path)
    (path / "meta.pt").write_bytes(b"")
    made = trainer(tmp_path, GPipeStrategy([3, 3]), devices=2)

    with pytest.raises(EOFError) as error:
        made.validate(Classifier(), datamodule=Data(), ckpt_path=path)

    assert_noted(error.value, path / "meta.pt")
