"""Measures calls: the seconds that they take, or their floating-point operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

T = TypeVar("T")


class Meter:
    """Measures calls: their seconds on a device or, on the meta device, their operations.

    Operations are floating-point ones of matrix products, convolutions and attention.

    Attributes:
        unit: The unit of the costs.
        exact: True if a call costs the same every time, also if its activations are dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self.exact = device.type == "meta"
        self.unit: Literal["s", "FLOP"] = "FLOP" if self.exact else "s"
        self._device = device

    def __call__(self, call: Callable[[], T]) -> tuple[T, float]:
        """Make a call, and return its result and its cost."""
        if self.exact:
            with _Counting() as counting:
                result = call()
            return result, float(counting.total)
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        return result, time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Counting(TorchDispatchMode):
    # PyTorch's FlopCounterMode does more: it registers hooks on all modules and their inputs.
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(function._overloadpacket)
        if count is None and function is not torch.ops.prim.device.default:
            with self:  # an operator that is made of others, such as attention on meta tensors
                made = function.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        result = function(*args, **kwargs)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=result)
        return result
