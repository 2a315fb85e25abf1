"""torch.cuda for simulated GPUs: what a CPU build of torch lacks, or refuses to do.

Most of CUDA is behind PyTorch's interfaces for any accelerator, which the library implements;
``torch.cuda`` also calls functions that only a CUDA build has, and those are replaced here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.simcuda.simulation import Simulation

Device = torch.device | str | int | None


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Device = None, priority: int = 0, **ids: Any) -> Any:
        # A new stream of a device, or the one with these ids.
        given = ids or {"device": torch.device("cuda", _index(device))}
        return super().__new__(cls, **given)

    @classmethod
    def known(cls, device: int, id: int) -> Any:
        """The stream of a device that has this id."""
        return cls(stream_id=id, device_index=device, device_type=1)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """As torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self._time = time.perf_counter()

    def elapsed_time(self, end: torch.Event) -> float:
        # PyTorch's own does not take an event of a class that is derived from its own.
        assert isinstance(end, Event)
        return 1e3 * (end._time - self._time)


def _index(device: Device) -> int:
    """The index of a device; without one, the current device's."""
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return torch.cuda.current_device() if index is None or index < 0 else index


def replace_torch_cuda(simulation: Simulation) -> None:
    """Make torch.cuda use the simulated devices."""
    for replace in (_devices, _streams, _generators, _memory, _properties):
        for name, value in replace(simulation).items():
            setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.random.manual_seed_all = torch.cuda.manual_seed_all
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.UntypedStorage.clone = _clone_of_storage(torch.UntypedStorage.clone)  # type: ignore[method-assign]  # replaced


def _devices(simulation: Simulation) -> dict[str, Any]:
    def exchange(device: int) -> int:
        old = simulation.current_device
        if device >= 0:
            simulation.current_device = device
        return old

    def set_device(device: Device) -> None:
        exchange(_index(device))

    return {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "device_count": lambda: simulation.devices,
        "current_device": lambda: simulation.current_device,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
    }


def _streams(simulation: Simulation) -> dict[str, Any]:
    def current_stream(device: Device = None) -> Any:
        index = _index(device)
        return Stream.known(index, torch._C._accelerator_getStream(index).stream_id)

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch._C._accelerator_setStream(stream)
            simulation.current_device = stream.device_index

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream.known(_index(device), 0),
        "set_stream": set_stream,
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device)),
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: None,
    }


def _generators(simulation: Simulation) -> dict[str, Any]:
    with simulation.new_generators_are_default():
        all_of_them = tuple(torch.Generator(f"cuda:{k}") for k in range(simulation.devices))

    def current() -> torch.Generator:
        return all_of_them[simulation.current_device]

    def seed_all() -> None:
        for generator in all_of_them:
            generator.seed()

    def manual_seed_all(seed: int) -> None:
        for generator in all_of_them:
            generator.manual_seed(int(seed))

    def set_state(state: torch.Tensor, device: Device = "cuda") -> None:
        all_of_them[_index(device)].set_state(state)

    def set_states(states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(all_of_them, states, strict=False):
            generator.set_state(state)

    return {
        "default_generators": all_of_them,
        "initial_seed": lambda: current().initial_seed(),
        "manual_seed": lambda seed: current().manual_seed(int(seed)),
        "manual_seed_all": manual_seed_all,
        "seed_all": seed_all,
        "get_rng_state": lambda device="cuda": all_of_them[_index(device)].get_state(),
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [generator.get_state() for generator in all_of_them],
        "set_rng_state_all": set_states,
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    def allocated(device: Device = None) -> int:
        return simulation.allocated(_index(device))

    def peak(device: Device = None) -> int:
        return simulation.peak(_index(device))

    def stats(device: Device = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": allocated(device),
            "allocated_bytes.all.peak": peak(device),
        }

    fractions: dict[int, float] = {}

    def limit(fraction: float, device: Device = None) -> None:
        index = _index(device)
        fractions[index] = fraction
        simulation.set_limit(
            index, int(fraction * torch.cuda.get_device_properties(index).total_memory)
        )

    return {
        "set_per_process_memory_fraction": limit,
        "get_per_process_memory_fraction": lambda device=None: fractions.get(_index(device), 1.0),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda device=None: simulation.reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _properties(simulation: Simulation) -> dict[str, Any]:
    name, (major, minor) = "simulated GPU", (7, 0)
    properties = [
        SimpleNamespace(
            name=name,
            major=major,
            minor=minor,
            total_memory=2**34,
            multi_processor_count=1,
            uuid=f"simulated-{index}",  # the same one in all processes
        )
        for index in range(simulation.devices)
    ]
    return {
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties[_index(device)],
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def _clone_of_storage(on_host: Any) -> Any:
    """The constructor of storages knows only the devices that torch was built with."""

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return on_host(storage)
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return content.clone().untyped_storage()

    return clone
