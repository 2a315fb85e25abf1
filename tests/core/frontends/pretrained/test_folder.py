import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_gpipe.core.frontends.pretrained.folder import tensors_in


def shards(folder: Path) -> Path:
    """Two files and their index."""
    save_file(
        {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}, folder / "1.safetensors"
    )
    save_file({"c": torch.full((1, 2), 5.0, dtype=torch.bfloat16)}, folder / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return folder


def test_shards_and_their_index(tmp_path: Path) -> None:
    found = tensors_in(shards(tmp_path))

    assert {name: (each.shape, each.floating) for name, each in found.items()} == {
        "a": ((2,), True),
        "b": ((3,), False),
        "c": ((1, 2), True),
    }
    assert found["c"].read().tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("path", ["", "model.safetensors"])
def test_one_file_and_its_folder(tmp_path: Path, path: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    assert list(tensors_in(tmp_path / path)) == ["a"]


def test_files_that_lack_what_the_index_lists(tmp_path: Path) -> None:
    save_file({"c": torch.ones(2)}, shards(tmp_path) / "1.safetensors")

    with pytest.raises(ValueError, match="must have the tensors that its index lists.*for a, b"):
        tensors_in(tmp_path)


def test_folder_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(FileNotFoundError, match=r"one with pytorch_model\.bin\..*save_pretrained"):
        tensors_in(tmp_path)


def test_name_of_a_model_of_a_hub() -> None:
    with pytest.raises(FileNotFoundError, match="some/model, nothing there.*snapshot_download"):
        tensors_in(Path("some/model"))


def test_no_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)

    with pytest.raises(ImportError, match="Run pip install safetensors."):
        tensors_in(tmp_path)
