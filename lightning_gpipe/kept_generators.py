"""The states of the random generators, kept in checkpoints.

Lightning saves none, so a run that goes on draws other numbers than the one that was interrupted:
other dropout, another order of the batches. They are saved as they are when the checkpoint is.

An epoch in which that was goes on with an iterator over its batches, which was made before, and had
drawn; one that begins makes its iterator after. Lightning makes one in both cases, before training
begins. So the states are set before it does, and again after that if an epoch goes on. Lightning
before 2.5.3 makes the iterator of an epoch that begins a second time: then they are set again, too.

A dataloader may draw the order of its batches from a generator of its own, such as that of
``DataLoader(generator=...)``. Those are saved and set with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from lightning_gpipe.core.data import map_tensors
from lightning_gpipe.core.faithful import LibraryGenerators, default_generator
from lightning_gpipe.own_entry import own_of, with_own


class States(NamedTuple):
    """The states of the generators of a process, of types that torch.load takes as safe.

    Attributes:
        host: Those of PyTorch, Python and NumPy on the host, and of what dataloaders hold.
        devices: Those of its devices other than the CPU.
    """

    host: dict[str, Any]
    devices: list[Tensor]


def states_of(devices: Iterable[torch.device], loaders: Iterable[Any]) -> States:
    """The states of the generators of this process.

    Args:
        devices: Its devices.
        loaders: Its dataloaders to train on.
    """
    (version, keys, gauss), numpy = LibraryGenerators().get_state()
    host = {
        "python": (version, torch.tensor(keys), gauss),
        "numpy": numpy and (numpy[0], torch.tensor(numpy[1].tolist()), *numpy[2:]),
        "torch": torch.get_rng_state(),
        "loaders": [[own.get_state() for own in _held(loader)] for loader in loaders],
    }
    return States(host, [generator.get_state() for generator in _generators(devices)])


def with_states(
    checkpoint: Mapping[str, Any], pipelines: Sequence[Sequence[States]], *, in_an_epoch: bool
) -> dict[str, Any]:
    """A checkpoint with the states of all processes.

    Args:
        checkpoint: The checkpoint.
        pipelines: For each pipeline, those of each of its processes.
        in_an_epoch: Whether the next iterator over the batches is made after what is left of one.
    """
    kept = {"pipelines": list(map(_joined, pipelines)), "in_an_epoch": in_an_epoch}
    return with_own(checkpoint, generators=kept)


class KeptGenerators:
    """The states that a checkpoint has for this process, until it trains."""

    def __init__(self) -> None:
        self._states: States | None = None
        self._in_an_epoch = False
        self._loaders: list[Any] = []  # from which training begins

    def take(self, checkpoint: Mapping[str, Any], replica: int, place: int, processes: int) -> None:
        """Take what a checkpoint has, if it has any, for a process.

        Of another number of processes, each has what the first had; of another number of devices
        they have none.

        Args:
            checkpoint: The checkpoint.
            replica: The number of the process's pipeline.
            place: The number of the process in it.
            processes: How many processes the pipeline has.
        """
        kept = own_of(checkpoint, "generators")
        if kept is None or replica >= len(kept["pipelines"]):
            return
        row = kept["pipelines"][replica]
        hosts, devices = row["hosts"], row["devices"]
        each, rest = divmod(len(devices), processes)
        self._states = States(
            hosts[place if len(hosts) == processes else 0],
            [] if rest else devices[place * each : (place + 1) * each],
        )
        self._in_an_epoch = kept["in_an_epoch"]

    def before_iterator(self, devices: Iterable[torch.device], loader: Any) -> None:
        """Set them before an iterator over the batches of the epoch is made.

        Args:
            devices: Those of this process.
            loader: One of the dataloaders to train on, which come in their order.
        """
        if self._states is not None:
            self._loaders.append(loader)
            _set(self._states, devices, self._loaders)

    def on_train_start(self, devices: Iterable[torch.device], *, again: bool) -> bool:
        """Set them before the next batch, if its epoch goes on.

        Args:
            devices: Those of this process.
            again: Whether an epoch begins, and an iterator over its batches is made again.

        Returns:
            Whether this is a run that goes on with the first batch of an epoch.
        """
        states = self._states
        if states is not None and (self._in_an_epoch or again):
            _set(states, devices, self._loaders)
        self.drop()
        return states is not None and not self._in_an_epoch

    def drop(self) -> None:
        """Forget them."""
        self._states = None
        self._loaders = []


def _joined(pipeline: Sequence[States]) -> dict[str, Any]:
    """Those of the processes of a pipeline; of the host once, if they are the same in all."""
    hosts = [each.host for each in pipeline]
    same = all(_plain(each) == _plain(hosts[0]) for each in hosts)
    devices = list(chain.from_iterable(each.devices for each in pipeline))
    return {"hosts": hosts[:1] if same else hosts, "devices": devices}


def _plain(value: Any) -> Any:
    """A state that can be compared."""
    return map_tensors(Tensor.tolist, value)


def _set(states: States, devices: Iterable[torch.device], loaders: Iterable[Any]) -> None:
    version, keys, gauss = states.host["python"]
    numpy = states.host["numpy"]
    numpy = numpy and (numpy[0], numpy[1].numpy(), *numpy[2:])
    LibraryGenerators().set_state(((version, tuple(keys.tolist()), gauss), numpy))
    torch.set_rng_state(states.host["torch"])
    for generator, state in zip(_generators(devices), states.devices, strict=False):
        generator.set_state(state)
    for loader, own in zip(loaders, states.host["loaders"], strict=False):
        for generator, state in zip(_held(loader), own, strict=False):
            generator.set_state(state)


def _held(loader: Any) -> list[Generator]:
    """The generators that a dataloader and its samplers hold, each once."""
    batches = getattr(loader, "batch_sampler", None)
    holders = loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    held = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in held if isinstance(each, Generator)))


def _generators(devices: Iterable[torch.device]) -> list[Generator]:
    """Those of devices other than the CPU."""
    return [default_generator(each) for each in dict.fromkeys(devices) if each.type != "cpu"]
