"""The entry that a pipeline adds to a checkpoint: measured balances and random states.

Two measurements of time are never equal, and the random numbers that layers draw depend on their
stage. So a resumed run takes the balance of the interrupted one, and measures nothing. Lightning
saves no random states, so it would draw other numbers: other dropout, another order of the batches.
A DataLoader may have a generator of its own; its state is saved with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lightning_gpipe.core.data import map_tensors
from lightning_gpipe.core.faithful import LIBRARIES, RandomState, default_generator

_KEY = "lightning_gpipe"  # of the one entry that a pipeline adds; a plain Trainer ignores it


def with_entry(checkpoint: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return the checkpoint with these values added to the entry."""
    return {**checkpoint, _KEY: {**checkpoint.get(_KEY, {}), **values}}


def value_of_entry(checkpoint: Mapping[str, Any], name: str) -> Any:
    """Return a value of the entry; None if there is none."""
    return checkpoint.get(_KEY, {}).get(name)


class States(NamedTuple):
    """The states of a process's generators, of types that torch.load accepts as safe."""

    host: dict[str, Any]  # of PyTorch, Python and NumPy on the host, and of the dataloaders
    devices: list[Tensor]  # of the devices other than the CPU


def states_of(devices: Iterable[torch.device], loaders: Iterable[Any]) -> States:
    """Return the states of this process, with its devices and its dataloaders to train on."""
    (version, keys, gauss), numpy = RandomState.of(LIBRARIES).states
    host = {
        "python": (version, torch.tensor(keys), gauss),
        "numpy": numpy and (numpy[0], torch.tensor(numpy[1].tolist()), *numpy[2:]),
        "torch": torch.get_rng_state(),
        "loaders": [list(RandomState.of(generators_of(loader)).states) for loader in loaders],
    }
    return States(host, list(RandomState.of(_of_devices(devices)).states))


def with_states(
    checkpoint: Mapping[str, Any], pipelines: Sequence[Sequence[States]], *, in_an_epoch: bool
) -> dict[str, Any]:
    """Return the checkpoint with the states of each process of each pipeline.

    ``in_an_epoch`` says that the resumed run finishes an epoch before it makes another iterator.
    """
    rows = []
    for states in pipelines:
        hosts = [map_tensors(Tensor.tolist, state.host) for state in states]
        same = all(host == hosts[0] for host in hosts)  # most often; then one is saved
        devices = [device for state in states for device in state.devices]
        rows.append({"hosts": [x.host for x in states[: 1 if same else None]], "devices": devices})
    return with_entry(checkpoint, generators={"pipelines": rows, "in_an_epoch": in_an_epoch})


def saved_states(
    checkpoint: Mapping[str, Any], replica: int, place: int, processes: int
) -> tuple[States | None, bool]:
    """Return the states of process ``place`` of pipeline ``replica``, or None, and ``in_an_epoch``.

    With another number of processes, each gets the host states of the first, and its share of those
    of devices, if they can be divided.
    """
    saved = value_of_entry(checkpoint, "generators")
    if saved is None or replica >= len(saved["pipelines"]):
        return None, False
    row = saved["pipelines"][replica]
    hosts, devices = row["hosts"], row["devices"]
    number, rest = divmod(len(devices), processes)
    host = hosts[place if len(hosts) == processes else 0]
    own = [] if rest else devices[place * number : (place + 1) * number]
    return States(host, own), saved["in_an_epoch"]


def set_states(states: States, devices: Iterable[torch.device], loaders: Iterable[Any]) -> None:
    """Set the generators of this process, its devices and these dataloaders."""
    version, keys, gauss = states.host["python"]
    numpy = states.host["numpy"]
    numpy = numpy and (numpy[0], numpy[1].numpy(), *numpy[2:])
    python = version, tuple(keys.tolist()), gauss
    RandomState(LIBRARIES, [python, numpy]).restore()
    torch.set_rng_state(states.host["torch"])
    for generator, state in zip(_of_devices(devices), states.devices, strict=False):
        generator.set_state(state)
    for loader, own in zip(loaders, states.host["loaders"], strict=False):
        for generator, state in zip(generators_of(loader), own, strict=False):
            generator.set_state(state)


def generators_of(loader: Any) -> list[Generator]:
    """Return the generators of a dataloader and its samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    attributes = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(x for x in attributes if isinstance(x, Generator)))


def _of_devices(devices: Iterable[torch.device]) -> list[Generator]:
    return [default_generator(device) for device in dict.fromkeys(devices) if device.type != "cpu"]
