"""Sharded checkpoints: folders to which each process writes its own part.

torch.distributed.checkpoint lists which file has which tensor. So all processes write their tensors
at the same time, and later read those they need, under any balance and number of processes.

The format is that of Lightning's FSDPStrategy: ``model`` and ``optimizer_0`` in shards, and the
rest in ``meta.pt``; ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` converts it to
a single file. A folder cannot be replaced atomically: the new one is written beside the old one,
which is removed last. Paths are those of fsspec, such as ``s3://bucket/my.ckpt``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_gpipe.checkpoints.atomic_file import on_this_machine
from lightning_gpipe.checkpoints.portable import divided_as_in, load_optimizer_state

_REST = "meta.pt"
_MODEL = "model"
_OPTIMIZER = "optimizer_"


def folder_of(path: str) -> str | None:
    """Return the folder of the checkpoint at ``path``, or None if it is no sharded checkpoint.

    After an interrupted save it is the folder of the previous checkpoint.
    """
    if not _is_known(path):
        return None
    for folder in (path, _beside(path, "old")):
        if _is_complete(folder):
            return folder
        if _exists(path):
            return None
    return None


def make_room(path: str) -> None:
    """Remove the remains of an interrupted save; one process calls this before all save."""
    part = _beside(path, "part")
    _remove(part)
    system, place = url_to_fs(part)
    system.makedirs(place)


@contextmanager
def set_aside(path: str) -> Iterator[None]:
    """Let a ``with`` block write a file in the place of a sharded checkpoint, if there is one.

    The folder is removed at the end of the block, or restored on an error.
    """
    if not _is_known(path):
        yield
        return
    _remove(_beside(path, "part"))
    old = _beside(path, "old")
    if _is_complete(path):
        _remove(old)
        _move(path, old)
    try:
        yield
    except BaseException:
        if _is_complete(old) and not _exists(path):
            _move(old, path)
        raise
    if _is_complete(old):
        _remove(old)


def save_parts(
    path: str, checkpoint: Mapping[str, Any], group: ProcessGroup | None, *, first: bool
) -> None:
    """Write a sharded checkpoint; all processes with a part of it call this.

    The ``first`` process writes ``meta.pt`` and moves the folder to ``path``. If a process could
    not write, a RuntimeError is raised, and the previous checkpoint is whole.
    """
    rest = dict(checkpoint)
    parts = {_MODEL: {name: _closed(x) for name, x in rest.pop("state_dict").items()}}
    for k, state in enumerate(rest.pop("optimizer_states", [])):
        parts[f"{_OPTIMIZER}{k}"] = state
    unfinished = _beside(path, "part")
    try:
        with _without_warning():
            save(parts, checkpoint_id=_id(unfinished), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise RuntimeError(f"a part of the checkpoint {path} was not written: {error}") from error
    if first:
        system, place = url_to_fs(rest_of(unfinished))
        with system.open(place, "wb") as file:
            torch.save(rest, file)
        old = _beside(path, "old")
        _remove(old)
        if _exists(path):
            _move(path, old)
        _move(unfinished, path)
        _remove(old)


def optimizer_part(state: Mapping[str, Any], own: Iterable[Any], *, first: bool, some: bool) -> Any:
    """Return the part of an optimizer's state dict that this process saves.

    That is the state of its ``own`` parameters and, in the ``first`` process, the parameter groups.
    ``some`` says whether any process has a state.
    """
    # Shards need strings as the keys of nested dicts. So parameters are numbered by strings, which
    # an optimizer accepts if its parameter groups have them, too.
    states = {str(k): {name: _closed(x) for name, x in state["state"][k].items()} for k in own}
    part: dict[str, Any] = {"state": states if some else _Closed({})}
    if first:
        groups = [{**one, "params": list(map(str, one["params"]))} for one in state["param_groups"]]
        part["param_groups"] = _Closed(groups)
    return part


def load_rest(folder: str) -> dict[str, Any]:
    """Return empty states of the model and the optimizers, for Lightning's checkpoint."""
    names = {path[0] for path in _paths(_metadata(folder)).values()}
    optimizers = [name for name in names if str(name).startswith(_OPTIMIZER)]
    model: dict[str, Any] = {"state_dict": {}}
    return {**model, "optimizer_states": [{} for _ in optimizers]} if optimizers else model


def load_model(folder: str, module: nn.Module, *, strict: bool) -> None:
    """Load the model's tensors that are not on meta; if ``strict``, all names must be the same."""
    metadata, state = _metadata(folder), module.state_dict()
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
    needed = {x for x, value in state.items() if not (isinstance(value, Tensor) and value.is_meta)}
    values = _read(folder, metadata, [key for key, path in paths.items() if path[1] in needed])
    module.load_state_dict(divided_as_in(module, values.get(_MODEL, {})), strict=False)


def load_optimizer(folder: str, k: int, optimizer: Optimizer) -> None:
    """Load the state of optimizer ``k`` for the parameters that this process has."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    elsewhere = {str(index) for index, x in enumerate(parameters) if x.is_meta}
    metadata, name = _metadata(folder), f"{_OPTIMIZER}{k}"
    keys = [
        key
        for key, path in _paths(metadata).items()
        if path[0] == name and not (path[1] == "state" and {*path[2:3]} & elsewhere)
    ]
    state = _read(folder, metadata, keys)[name]
    load_optimizer_state(optimizer, {"state": state.get("state", {}), **state})


class _Closed:
    """Pickles as the dict, list or tuple in it, which shards then store as one value."""

    def __init__(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self._value), (self._value,)


def _closed(value: Any) -> Any:
    return _Closed(value) if type(value) in (dict, list, tuple) else value


def _read(folder: str, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in keys:
        stored = metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            flat[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        else:
            flat[key] = None
    # With either option, values that are not tensors would be loaded into a copy of ``flat``.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _without_warning():
        load(flat, checkpoint_id=_id(folder), planner=planner, no_dist=True)
    return unflatten_state_dict(flat, _paths(metadata))


@contextmanager
def _without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        yield


def _metadata(folder: str) -> Metadata:
    reader: Any = _storage_setup(None, _id(folder), reader=True)
    metadata: Metadata = reader.read_metadata()
    return metadata


def _paths(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    paths: dict[str, tuple[str | int, ...]] = metadata.planner_data
    return paths


def rest_of(folder: str) -> str:
    """Return the path of a folder's file beside the states of model and optimizers."""
    return f"{folder}/{_REST}"


def _id(folder: str) -> Path | str:
    return on_this_machine(folder) or folder


def _beside(path: str, word: str) -> str:
    return f"{path.rstrip('/')}.{word}"


def _is_known(path: str) -> bool:
    """Return False for a path that only a CheckpointIO of the user's can read."""
    try:
        url_to_fs(path)
    except (ImportError, ValueError):  # a library is not there, or a protocol has none
        return False
    return True


def _is_complete(folder: str) -> bool:
    system, place = url_to_fs(rest_of(folder))
    return bool(system.isfile(place))


def _exists(path: str) -> bool:
    system, place = url_to_fs(path)
    return bool(system.exists(place))


def _move(path: str, target: str) -> None:
    system, place = url_to_fs(path)
    system.mv(place, system._strip_protocol(target), recursive=True)


def _remove(path: str) -> None:
    system, place = url_to_fs(path)
    if on_this_machine(path) is not None and os.path.islink(place):
        os.unlink(place)
    elif system.exists(place):
        system.rm(place, recursive=True)
