"""What Lightning has, by introspection: a new version with a new feature is found out here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import ModuleType

import lightning as L
from lightning.pytorch import accelerators, callbacks, loggers, plugins, profilers
from lightning.pytorch.core import hooks
from lightning.pytorch.plugins import environments

ARGUMENTS = "Arguments of the Trainer"
METHODS = "Methods of the Trainer"
HOOKS = "Hooks of a LightningModule"
MODULE = "Methods and attributes of a LightningModule"
DATA = "Hooks of a LightningDataModule"
CALLBACK = "Hooks of a Callback"
CALLBACKS = "Callbacks"
LOGGERS = "Loggers"
PROFILERS = "Profilers"
PLUGINS = "Plugins"
ENVIRONMENTS = "Cluster environments"
ACCELERATORS = "Accelerators"

_MOVED = {"HPUAccelerator", "TPUAccelerator"}  # are there only to say so
_CONSTANTS = "CHECKPOINT_HYPER_PARAMS_"  # names of keys, of no use to a user's code


def features() -> dict[str, set[str]]:
    """The names of all features of the installed Lightning, by kind."""
    module = [hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks]
    of_module = _public(*module)
    return {
        ARGUMENTS: {*inspect.signature(L.Trainer.__init__).parameters} - {"self"},
        METHODS: {name for name in _public(L.Trainer) if inspect.isfunction(vars(L.Trainer)[name])}
        | {"init_module"},  # a context manager
        HOOKS: of_module,
        MODULE: _public(L.LightningModule) - of_module,
        DATA: _public(L.LightningDataModule, hooks.DataHooks),
        CALLBACK: _public(L.Callback),
        CALLBACKS: {*callbacks.__all__},
        LOGGERS: {*loggers.__all__},
        PROFILERS: {*profilers.__all__},
        PLUGINS: {*plugins.__all__},
        ENVIRONMENTS: _classes(environments),
        ACCELERATORS: _classes(accelerators) - _MOVED,
    }


def _public(*classes: type) -> set[str]:
    names: Iterable[str] = (name for each in classes for name in vars(each))
    return {name for name in names if not name.startswith(("_", _CONSTANTS))}


def _classes(module: ModuleType) -> set[str]:
    return {
        name for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"
    }
