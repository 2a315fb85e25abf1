"""The parameter slots of a module, in which the caller's code finds its own parameters.

With a loss for each micro-batch, the caller's code runs while stages do, on other threads. It may
look up a parameter in an optimizer's state, so it must not find a shadow.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

from torch import nn

Parameters = dict[str, nn.Parameter | None]


class ParameterSlots(Parameters):
    """The slots of a module: parameters for the caller's code, and shadows for layers.

    The shadows are in the dict's own storage, which torch.compile reads past these methods.
    """

    def __init__(self, slots: Parameters, by_caller: Callable[[], bool]) -> None:
        super().__init__(slots)
        self._slots = slots
        self._by_caller = by_caller
        self._shadowed: set[str] = set()

    def hide(self, name: str, shadow: nn.Parameter) -> None:
        """Let layers find a shadow under a name, and the caller's code the parameter."""
        self._shadowed.add(name)
        super().__setitem__(name, shadow)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._slots[name] if self._by_caller() else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self._slots.get(name, default) if self._by_caller() else super().get(name, default)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # a view of a dict
        return self._slots.items() if self._by_caller() else super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]  # a view of a dict
        return self._slots.values() if self._by_caller() else super().values()

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        by_caller, shadowed = self._by_caller(), name in self._shadowed
        if by_caller or not shadowed:  # layers write to their own slots, too
            self._slots[name] = value
        if not (by_caller and shadowed):
            super().__setitem__(name, value)

    def __reduce__(self) -> tuple[type[Parameters], tuple[Parameters]]:
        return dict, (dict(self.items()),)
