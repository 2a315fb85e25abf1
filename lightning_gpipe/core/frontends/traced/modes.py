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
    """Grad mode, what autocast does on each kind of device, and the default device."""

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    device: torch.device | None

    @classmethod
    def now(cls) -> Modes:
        """The modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each))
                for each in _DEVICES
            ),
            next((each.device for each in reversed(_stack()) if _is_device(each)), None),
        )

    @contextmanager
    def within(self, outer: Modes) -> Iterator[None]:
        """Set what differs from ``outer``."""
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


def settings() -> dict[str, Any]:
    """What else a forward may set around its calls, by the name of what sets it."""
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
    """Raise if the forward has changed what a pipeline would not carry to its stages.

    Raises:
        TraceError: Names what sets it.
    """
    for name, value in settings().items():
        if name in before and before[name] != value:
            raise TraceError(f"it changes what {name} sets, which no stage would know of")


def function_modes() -> int:
    """How many function modes the thread is in, besides that of ``with torch.device(...)``."""
    return sum(not _is_device(each) for each in _stack())


def _stack() -> list[Any]:
    return [torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack())]


def _is_device(mode: Any) -> bool:
    return isinstance(mode, DeviceContext)


class Under:
    """Runs a call under modes of its own.

    Args:
        run: What is called.
        modes: Its modes.
        outer: The modes in which the forward begins.
    """

    def __init__(self, run: Callable[..., Any], modes: Modes, outer: Modes) -> None:
        self._run, self._modes, self._outer = run, modes, outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._modes.within(self._outer):
            return self._run(*args, **kwargs)
