"""Grad mode, autocast and the default device as a forward sets them around some of its calls.

``with torch.no_grad():`` in a forward leaves no trace in a graph. So each recorded call is compared
with the state in which the forward began, and runs under its own where that differs. Settings of
the whole process, such as ``sdpa_kernel``, would act on all stages at once, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx.proxy import TraceError
from torch.utils._device import DeviceContext

_DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """Grad mode, autocast on each kind of device, and the default device."""

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    device: torch.device | None

    @classmethod
    def now(cls) -> Modes:
        """Return the modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _DEVICES
            ),
            next((m.device for m in reversed(_stack()) if isinstance(m, DeviceContext)), None),
        )

    @contextmanager
    def within(self, outer: Modes) -> Iterator[None]:
        """Set the modes that differ from ``outer``."""
        with ExitStack() as stack:
            if self.grad != outer.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, mine, other in zip(_DEVICES, self.autocast, outer.autocast, strict=True):
                if mine != other:
                    enabled, dtype = mine
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            if self.device is not None and self.device != outer.device:
                stack.enter_context(self.device)
            yield


def run_under(
    modes: Modes, outer: Modes, run: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a call under modes of its own, within those in which the forward began."""
    with modes.within(outer):
        return run(*args, **kwargs)


def settings() -> dict[str, Any]:
    """Return the other settings that a forward may change, by the name of the function for it."""
    cuda = torch.backends.cuda
    return {
        "sdpa_kernel": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "inference_mode": torch.is_inference_mode_enabled(),
        "set_default_dtype": torch.get_default_dtype(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
    }


def check_settings(before: Mapping[str, Any]) -> None:
    """Raise TraceError if the forward has changed settings that stages would not have."""
    for name, value in settings().items():
        if before[name] != value:
            raise TraceError(f"it changes what {name} sets, which no stage would know of")


def function_modes() -> int:
    """Return the number of function modes of this thread, besides ``with torch.device(...)``."""
    return sum(not isinstance(mode, DeviceContext) for mode in _stack())


def _stack() -> list[Any]:
    return [torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack())]
