"""The states of the random generators, saved in checkpoints.

Lightning saves none, so a resumed run would draw other numbers than the interrupted one: other
dropout, another order of the batches. A DataLoader may have a generator of its own, such as
``DataLoader(generator=...)``; its state is saved with the others.

When resuming mid-epoch, the data loader's iterator had already drawn its shuffle when the states
were saved; at an epoch's start it had not. Lightning makes the iterator before training begins in
both cases. So the states are set before it is made and, mid-epoch, again afterwards. Lightning
before 2.5.3 makes the iterator of a new epoch twice: then the states are set twice, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lightning_gpipe.checkpoints.entry import value_of_entry, with_entry
from lightning_gpipe.core.data import map_tensors
from lightning_gpipe.core.faithful import LIBRARIES, RandomState, default_generator


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
        "loaders": [list(RandomState.of(_of_loader(loader)).states) for loader in loaders],
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


class CheckpointGenerators:
    """The states from a checkpoint, for this process, until it trains."""

    def __init__(self) -> None:
        self._states: States | None = None
        self._in_an_epoch = False
        self._loaders: list[Any] = []  # from which training begins

    def take(self, checkpoint: Mapping[str, Any], replica: int, place: int, processes: int) -> None:
        """Read the states of process ``place`` of pipeline ``replica``, if the checkpoint has any.

        With another number of processes, each gets the host states of the first; if the devices
        cannot be divided among the processes, their states are dropped.
        """
        saved = value_of_entry(checkpoint, "generators")
        if saved is None or replica >= len(saved["pipelines"]):
            return
        row = saved["pipelines"][replica]
        hosts, devices = row["hosts"], row["devices"]
        number, rest = divmod(len(devices), processes)
        self._states = States(
            hosts[place if len(hosts) == processes else 0],
            [] if rest else devices[place * number : (place + 1) * number],
        )
        self._in_an_epoch = saved["in_an_epoch"]

    def before_iterator(self, devices: Iterable[torch.device], loader: Any) -> None:
        """Set the states before an iterator over the batches of the next dataloader is made."""
        if self._states is not None:
            self._loaders.append(loader)
            _set(self._states, devices, self._loaders)

    def on_train_start(self, devices: Iterable[torch.device], *, again: bool) -> bool:
        """Set the states before the next batch, when resuming mid-epoch.

        ``again`` says that an epoch begins, and Lightning makes its iterator a second time.
        Returns whether this is a resumed run that begins an epoch.
        """
        states = self._states
        if states is not None and (self._in_an_epoch or again):
            _set(states, devices, self._loaders)
        self.drop()
        return states is not None and not self._in_an_epoch

    def drop(self) -> None:
        """Forget the states."""
        self._states = None
        self._loaders = []


def _set(states: States, devices: Iterable[torch.device], loaders: Iterable[Any]) -> None:
    version, keys, gauss = states.host["python"]
    numpy = states.host["numpy"]
    numpy = numpy and (numpy[0], numpy[1].numpy(), *numpy[2:])
    python = version, tuple(keys.tolist()), gauss
    RandomState(LIBRARIES, [python, numpy]).restore()
    torch.set_rng_state(states.host["torch"])
    for generator, state in zip(_of_devices(devices), states.devices, strict=False):
        generator.set_state(state)
    for loader, own in zip(loaders, states.host["loaders"], strict=False):
        for generator, state in zip(_of_loader(loader), own, strict=False):
            generator.set_state(state)


def _of_loader(loader: Any) -> list[Generator]:
    """The generators of a dataloader and its samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    attributes = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(x for x in attributes if isinstance(x, Generator)))


def _of_devices(devices: Iterable[torch.device]) -> list[Generator]:
    """The generators of the devices other than the CPU."""
    return [default_generator(device) for device in dict.fromkeys(devices) if device.type != "cpu"]
