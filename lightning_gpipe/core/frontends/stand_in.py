"""A module that stands in for another one, with everything that it has.

A pipeline is called in place of the module that it is given. If it had only the layers in common,
all that the user has put on the module itself would be lost without a word: hooks, parameters that
a hook uses, entries of the state dict. So it shares the very containers of the module, and what is
added to either later is in both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override


class StandIn(nn.Module):
    """Has the layers, the parameters, the buffers and the hooks of ``module`` as its own.

    Args:
        module: The module; its state dict is that of the stand-in.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, own in list(vars(self).items()):
            if isinstance(own, (dict, set)):  # everything that nn.Module registers something in
                self.__dict__[name] = module.__dict__[name]
        self.__dict__["_module"] = module  # by assignment nn.Module would register it as a child
        self.training = module.training

    @property
    def _original(self) -> nn.Module:
        module: nn.Module = self.__dict__["_module"]
        return module

    # Which kind the backward hooks are of is no container, so it is not shared by itself.

    @property
    def _is_full_backward_hook(self) -> bool | None:
        return self._original._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, full: bool | None) -> None:
        if full is not None:  # nn.Module sets it to None for a module without hooks
            self._original._is_full_backward_hook = full

    # A class of the user's may have its own ways to name layers, and to save and load a state dict.

    @override
    def get_submodule(self, target: str) -> nn.Module:
        return self._original.get_submodule(target) if target else self

    @override
    def _save_to_state_dict(self, *args: Any) -> None:
        self._original._save_to_state_dict(*args)

    @override
    def _load_from_state_dict(self, *args: Any) -> None:
        self._original._load_from_state_dict(*args)
