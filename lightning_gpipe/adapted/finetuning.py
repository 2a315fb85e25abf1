"""Lightning's finetuning callbacks on several devices.

Before such a callback adds unfrozen parameters to an optimizer, it compares each of them with those
that the optimizer has, by ``torch.equal``, which raises if their devices differ. So while its
``finetune_function`` runs, tensors are compared on the device of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class Finetuning:
    """The finetuning callbacks of a fit, from :meth:`adapt` to :meth:`release`."""

    def __init__(self) -> None:
        self._callbacks: list[BaseFinetuning] = []

    def adapt(self, callbacks: Iterable[Callback]) -> None:
        """Let those of ``callbacks`` that finetune compare parameters on several devices."""
        self._callbacks = [each for each in callbacks if isinstance(each, BaseFinetuning)]
        for callback in self._callbacks:
            vars(callback)["finetune_function"] = _comparing(callback.finetune_function)

    def release(self) -> None:
        """Leave the callbacks as the user made them."""
        for callback in self._callbacks:
            vars(callback).pop("finetune_function", None)
        self._callbacks = []


def _comparing(function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        with _EqualAcrossDevices():
            function(*args)

    return run


class _EqualAcrossDevices(TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.equal:
            one, other = args
            args = one, other.to(one.device)
        return func(*args, **(kwargs or {}))
