"""Starts the simulation, before torch is imported, and tells which hazards it found."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import TracebackType

from tests.simcuda.build import UnavailableError, library, torch_folder


class Simulation:
    """The simulated GPUs of this process; there is one.

    Args:
        path: Its library.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.simulated_hazard.restype = ctypes.c_char_p
        self._library.simulated_allocated.restype = ctypes.c_int64
        self._library.simulated_peak.restype = ctypes.c_int64

    @property
    def devices(self) -> int:
        """How many there are."""
        return int(self._library.simulated_devices())

    @property
    def current_device(self) -> int:
        """The index of the calling thread's current device."""
        return int(self._library.simulated_current_device())

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._library.simulated_set_device(index)

    def allocated(self, device: int) -> int:
        """The bytes that tensors take on a device."""
        return int(self._library.simulated_allocated(device))

    def peak(self, device: int) -> int:
        """The most that they took since :meth:`reset_peak`."""
        return int(self._library.simulated_peak(device))

    def reset_peak(self, device: int) -> None:
        """Start to measure the peak anew."""
        self._library.simulated_reset_peak(device)

    def set_limit(self, device: int, size: int) -> None:
        """Raise OutOfMemoryError where tensors on a device would take more bytes."""
        self._library.simulated_set_limit(device, ctypes.c_int64(size))

    def take_hazards(self) -> list[str]:
        """The hazards since the last call: races, and memory that was freed too early."""
        count = self._library.simulated_hazards()
        found = [self._library.simulated_hazard(k).decode() for k in range(count)]
        self._library.simulated_forget_hazards()
        return found

    def new_generators_are_default(self) -> _DefaultGenerators:
        """In a ``with`` block, ``torch.Generator("cuda:1")`` is that device's default one."""
        return _DefaultGenerators(self._library)


class _DefaultGenerators:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __enter__(self) -> None:
        self._library.simulated_new_generators_are_default(1)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._library.simulated_new_generators_are_default(0)


def start() -> Simulation:
    """Give this process as many CUDA devices as the variable ``SIMULATED_GPUS`` says.

    To be called once, before torch is imported: torch asks for its devices while it is.

    Raises:
        UnavailableError: If there can be none here.
    """
    if "torch" in sys.modules:
        raise UnavailableError("torch was imported before they were started")
    devices = os.environ.get("SIMULATED_GPUS", "")
    if not devices.isdigit() or not 1 <= int(devices) <= 16:
        raise UnavailableError(f"SIMULATED_GPUS must be a number from 1 to 16: got {devices!r}")
    path = library()
    # The library uses torch's, which torch itself finds where they are already.
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    simulation = Simulation(path)
    from tests.simcuda.torch_cuda import replace_torch_cuda  # imports torch

    replace_torch_cuda(simulation)
    return simulation
