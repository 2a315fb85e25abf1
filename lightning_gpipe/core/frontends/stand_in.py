"""A module that stands in for another one, with everything that it has.

A pipeline that shared only the layers of the user's module would lose its hooks, its own parameters
and entries of the state dict silently. So it shares the containers of the module themselves, and an
addition to either is in both.
"""

from __future__ import annotations

from typing import Any, Self

from torch import nn
from typing_extensions import override


class StandIn(nn.Module):
    """Has the layers, the parameters, the buffers, the hooks and the state dict of ``module``."""

    _original: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, own in list(vars(self).items()):
            if isinstance(own, (dict, set)):  # all containers of nn.Module
                self.__dict__[name] = module.__dict__[name]
        self.__dict__["_original"] = module  # by assignment nn.Module would register it as a child

    # What is in no container is shared by properties.

    @property
    def training(self) -> bool:
        return self._original.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in vars(self):
            self._original.training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        return self._original._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, full: bool | None) -> None:
        if full is not None:  # nn.Module sets it to None for a module without hooks
            self._original._is_full_backward_hook = full

    # The user's class may override which layers train, how they are named, and how a state dict is
    # saved and loaded.

    @override
    def train(self, mode: bool = True) -> Self:
        self._original.train(mode)
        return self

    @override
    def get_submodule(self, target: str) -> nn.Module:
        return self._original.get_submodule(target) if target else self

    @override
    def _save_to_state_dict(self, *args: Any) -> None:
        self._original._save_to_state_dict(*args)

    @override
    def _load_from_state_dict(self, *args: Any) -> None:
        self._original._load_from_state_dict(*args)
