"""Checkpoints in a folder, to which each process writes its own part.

A single file must pass through one process. In a folder, torch.distributed.checkpoint lists which
file has which tensor, so each process writes what it has, at the same time as the others, and reads
what it needs, whatever the balance and the number of processes are by then.

The folder is what Lightning's FSDPStrategy writes: ``model`` and ``optimizer_0`` in shards, and the
rest in ``meta.pt``. So ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes a
single file of it. Folders cannot be replaced at once, as files can: the new one is written beside
the old one, which is removed last.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

REST = "meta.pt"
_MODEL = "model"
_OPTIMIZER = "optimizer_"


def folder_of(path: Path) -> Path | None:
    """The folder of a checkpoint at ``path``; the one before, if a newer was not put in its place.

    None if there is no such folder.
    """
    for folder in (path, _beside(path, "old")):
        if (folder / REST).is_file():
            return folder
        if path.exists():
            return None
    return None


def make_room(path: Path) -> None:
    """Remove what an interrupted save has left; one process calls this before others save."""
    _remove(_beside(path, "part"))
    _beside(path, "part").mkdir(parents=True)


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """A ``with`` block that writes a file, in the place of a folder if there is one.

    The folder is removed at the end of the block, and put back if it fails. What an interrupted
    save has left is removed.
    """
    _remove(_beside(path, "part"))
    old = _beside(path, "old")
    if (path / REST).is_file():
        _remove(old)
        os.rename(path, old)
    try:
        yield
    except BaseException:
        if (old / REST).is_file() and not path.exists():
            os.rename(old, path)
        raise
    if (old / REST).is_file():
        _remove(old)


def save_parts(
    path: Path, checkpoint: Mapping[str, Any], group: ProcessGroup | None, *, first: bool
) -> None:
    """Write a checkpoint, in all processes that have parts of it.

    Args:
        path: The folder.
        checkpoint: Lightning's, with the part of this process.
        group: These processes; None if there is one.
        first: Whether this is the one that writes the rest, and puts the folder in its place.

    Raises:
        RuntimeError: If a process could not write; the checkpoint that was there is whole.
    """
    rest = dict(checkpoint)
    parts = {_MODEL: {name: _closed(x) for name, x in rest.pop("state_dict").items()}}
    for k, state in enumerate(rest.pop("optimizer_states", [])):
        parts[f"{_OPTIMIZER}{k}"] = state
    unfinished = _beside(path, "part")
    try:
        with _alone_on_purpose():
            save(parts, checkpoint_id=unfinished, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise RuntimeError(f"a part of the checkpoint {path} was not written: {error}") from error
    if first:
        torch.save(rest, unfinished / REST)
        old = _beside(path, "old")
        _remove(old)
        if path.exists():
            os.rename(path, old)
        os.rename(unfinished, path)
        _remove(old)


def optimizer_part(state: Mapping[str, Any], own: Iterable[Any], *, first: bool, some: bool) -> Any:
    """What a process saves of an optimizer's state.

    The keys of a nested dict are strings in shards. So parameters are called by strings too, which
    any optimizer accepts where it finds the same ones in its groups.

    Args:
        state: The state dict of the optimizer.
        own: The keys of what this process saves, of what the optimizer keeps.
        first: Whether this process saves the groups.
        some: Whether any process saves something.
    """
    kept = {str(key): {name: _closed(x) for name, x in state["state"][key].items()} for key in own}
    part: dict[str, Any] = {"state": kept if some else _Closed({})}
    if first:
        groups = [{**one, "params": list(map(str, one["params"]))} for one in state["param_groups"]]
        part["param_groups"] = _Closed(groups)
    return part


def load_rest(folder: Path) -> dict[str, Any]:
    """What stands for the model and the optimizers in a checkpoint, until they are read."""
    names = {path[0] for path in _paths(_metadata(folder)).values()}
    optimizers = [name for name in names if str(name).startswith(_OPTIMIZER)]
    found: dict[str, Any] = {"state_dict": {}}
    return {**found, "optimizer_states": [{} for _ in optimizers]} if optimizers else found


def load_model(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Load what this process has of a model.

    Args:
        folder: The checkpoint.
        module: The model; what is on the meta device is left alone.
        strict: Whether both must have the same names.

    Raises:
        RuntimeError: If they must, and have not.
    """
    metadata = _metadata(folder)
    state = module.state_dict()
    paths = {key: path for key, path in _paths(metadata).items() if path[0] == _MODEL}
    stored = {str(path[1]) for path in paths.values()}
    if strict:
        missing = [name for name in state if name not in stored]
        unexpected = sorted(stored - set(state))
        if missing or unexpected:
            raise RuntimeError(
                f"a checkpoint must have the names of {type(module).__name__}: {folder} lacks "
                f"{missing or 'none'}, and has {unexpected or 'none'} beside. Load it into the "
                "model that was saved, or set strict_loading=False in it."
            )
    needed = {name for name, value in state.items() if not _on_meta(value)}
    values = _read(folder, metadata, [key for key, path in paths.items() if path[1] in needed])
    module.load_state_dict(values.get(_MODEL, {}), strict=False)


def load_optimizer(folder: Path, k: int, optimizer: Optimizer) -> None:
    """Load what this process has of the state of optimizer number ``k``."""
    parameters = [each for one in optimizer.param_groups for each in one["params"]]
    elsewhere = {str(index) for index, each in enumerate(parameters) if each.is_meta}
    metadata, name = _metadata(folder), f"{_OPTIMIZER}{k}"
    keys = [
        key
        for key, path in _paths(metadata).items()
        if path[0] == name and not (path[1] == "state" and {*path[2:3]} & elsewhere)
    ]
    found = _read(folder, metadata, keys)[name]
    optimizer.load_state_dict({"state": found.get("state", {}), **found})


class _Closed:
    """A dict or list that is written as one value, and read as what it is."""

    def __init__(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self._value), (self._value,)


def _closed(value: Any) -> Any:
    return _Closed(value) if type(value) in (dict, list, tuple) else value


def _read(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """The values of these keys, nested as they were saved."""
    flat: dict[str, Any] = {}
    for key in keys:
        known = metadata.state_dict_metadata[key]
        if isinstance(known, TensorStorageMetadata):
            flat[key] = torch.empty(known.size, dtype=known.properties.dtype)
        else:
            flat[key] = None
    # With either of these, values that are no tensors would be put into a copy.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone_on_purpose():
        load(flat, checkpoint_id=folder, planner=planner, no_dist=True)
    return unflatten_state_dict(flat, _paths(metadata))


@contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """A ``with`` block without the warning that other processes are not waited for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


def _metadata(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


def _paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    """Where each key belongs in what was saved."""
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data
    return paths


def _on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.name}.{word}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
