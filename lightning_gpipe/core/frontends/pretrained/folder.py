"""The contents of a folder of safetensors: names, files and shapes, from the headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_gpipe.core.frontends.stored import Stored, first_few, open_tensors


def tensors_in(path: Path) -> dict[str, Stored]:
    """List the tensors of a file of safetensors, or of a folder with one, or several and an index.

    Raises:
        FileNotFoundError: If the path does not lead to such files.
        ValueError: If the files lack a tensor of the index.
        ImportError: If safetensors is not installed.
    """
    files, listed = _files(path)
    tensors = {name: stored for file in files for name, stored in _contents(file).items()}
    if lacking := [name for name in listed if name not in tensors]:
        raise ValueError(
            f"the files in {path} must have the tensors that its index lists: got none for "
            f"{first_few(lacking)}. Save the model again with save_pretrained()."
        )
    return tensors


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """Return the files to read, and the names that an index lists."""
    if path.is_file():
        return [path], []
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        weight_map: dict[str, str] = json.loads(indices[0].read_text("utf-8"))["weight_map"]
        return [path / name for name in sorted(set(weight_map.values()))], list(weight_map)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1 and not indices:
        return files, []
    content = "nothing there"
    if path.is_dir():
        content = f"one with {first_few(sorted(x.name for x in path.iterdir())) or 'no files'}"
    raise FileNotFoundError(
        "pretrained weights must be in a file of safetensors, or in a folder with one, or with "
        f"several and their index: got {path}, {content}. Models of a hub are downloaded by "
        "huggingface_hub.snapshot_download(), and model.save_pretrained(folder) writes such a "
        "folder from other formats."
    )


def _contents(file: Path) -> dict[str, Stored]:
    with open_tensors(file) as header:
        slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118
        floating = ("F", "BF")  # as F32, BF16, F8_E4M3
        return {
            name: Stored(file, name, tuple(x.get_shape()), x.get_dtype().startswith(floating))
            for name, x in slices.items()
        }
