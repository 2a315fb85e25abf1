"""Lightning's finetuning callbacks on several devices.

Before such a callback adds unfrozen parameters to an optimizer, it compares each of them with the
optimizer's own by ``torch.equal``, which raises if their devices differ. So while its
``finetune_function`` runs, tensors are compared on the device of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_gpipe.strategy.adapters.replaced import ReplacedAttributes


def adapt_finetuning(callbacks: Iterable[Callback], replaced: ReplacedAttributes) -> None:
    """Let callbacks that finetune compare parameters on several devices."""
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            function = partial(_compare_across_devices, callback.finetune_function)
            replaced.set(callback, "finetune_function", function)


def _compare_across_devices(function: Callable[..., None], *args: Any) -> None:
    with _EqualAcrossDevices():
        function(*args)


class _EqualAcrossDevices(TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.equal:
            one, other = args
            args = one, other.to(one.device)
        return func(*args, **(kwargs or {}))
