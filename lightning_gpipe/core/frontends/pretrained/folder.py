"""What is in a folder of safetensors: names, files and shapes, from the headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_gpipe.core.frontends.stored import Stored, opened, shortened


def tensors_in(path: Path) -> dict[str, Stored]:
    """The tensors of a file of safetensors, or of a folder with one or with shards and an index.

    Raises:
        FileNotFoundError: If the path does not lead to such files.
        ValueError: If the files lack what the index lists.
        ImportError: If safetensors is not installed.
    """
    files, listed = _files(path)
    found = {name: stored for file in files for name, stored in _contents(file).items()}
    lacking = [name for name in listed if name not in found]
    if lacking:
        raise ValueError(
            f"the files in {path} must have the tensors that its index lists: got none for "
            f"{shortened(lacking)}. Save the model again with save_pretrained()."
        )
    return found


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and the names that an index promises."""
    if path.is_file():
        return [path], []
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        weight_map: dict[str, str] = json.loads(indices[0].read_text("utf-8"))["weight_map"]
        return [path / name for name in sorted(set(weight_map.values()))], list(weight_map)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not indices:
        return files, []
    inside = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    found = f"one with {shortened(inside) or 'no files'}" if path.is_dir() else "nothing there"
    raise FileNotFoundError(
        "pretrained weights must be in a file of safetensors, or in a folder with one, or with "
        f"several and their index: got {path}, {found}. Models of a hub are downloaded by "
        "huggingface_hub.snapshot_download(), and model.save_pretrained(folder) writes such a "
        "folder from other formats."
    )


def _contents(file: Path) -> dict[str, Stored]:
    with opened(file) as header:
        slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118
        return {
            name: Stored(file, name, tuple(each.get_shape()), _is_floating(each.get_dtype()))
            for name, each in slices.items()
        }


def _is_floating(dtype: str) -> bool:
    return dtype.startswith(("F", "BF"))  # as F32, BF16, F8_E4M3
