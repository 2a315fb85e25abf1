"""What the units of a model cost, measured when a balance asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.data import MicroBatching, check_chunks, check_microbatching
from lightning_gpipe.core.pipeline.sampling import Entry, entries_with, subject_of
from lightning_gpipe.core.pipeline.taken import Taken
from lightning_gpipe.core.pipeline.taking import take
from lightning_gpipe.core.plan import ActivationCheckpointing, ModelProfile
from lightning_gpipe.core.profile import Optimizers, intra_op_threads, profile_layers


class Measuring:
    """Measures what runs as pipelines, once, when it is asked for.

    Args:
        found: What runs as pipelines.
        entries: Tells what enters each of them.
        devices: Where they are to run; empty if that is not known.
        chunks: The number of micro-batches of a mini-batch.
        activation_checkpointing: Which of them are recomputed.
        microbatching: How it is cut.
        optimizer: What tells the bytes of the optimizer's state, see :func:`profile`.
        memory: The bytes of each device; empty if stages need not fit them.
        split: Whether backwards in two parts are measured, too.

    Attributes:
        devices, activation_checkpointing, memory, split: As given.
        done: What was measured so far.
    """

    def __init__(
        self,
        found: Sequence[Taken],
        entries: Callable[[], Sequence[Entry]],
        devices: Sequence[str | torch.device],
        *,
        chunks: int = 1,
        activation_checkpointing: ActivationCheckpointing = "except_last",
        microbatching: MicroBatching | None = None,
        optimizer: Optimizers = None,
        memory: Sequence[float] = (),
        split: bool = False,
    ) -> None:
        self.devices = list(map(torch.device, devices))
        self.activation_checkpointing = activation_checkpointing
        self.memory = memory
        self.done: list[ModelProfile] = []
        self._found, self._find = found, entries
        self._chunks, self._microbatching, self._optimizer = chunks, microbatching, optimizer
        self.split = split

    @property
    def profiles(self) -> list[ModelProfile]:
        """The costs of each, on the first device."""
        if not self.done:
            self.done = self._on(self.devices[0])
        return self.done

    def speeds(self) -> list[float]:
        """How many times as fast each device is as the first; by measurement if models differ."""
        kinds = dict(zip(map(_kind, self.devices), self.devices, strict=True))
        total, first = _total(self.profiles), _kind(self.devices[0])
        of_kind = {
            kind: 1.0 if kind == first else total / _total(self._on(device))
            for kind, device in kinds.items()
        }
        return [of_kind[_kind(device)] for device in self.devices]

    def at(self, chunks: int) -> ModelProfile:
        """The costs of the only module, in mini-batches of another number of micro-batches."""
        return self._on(self._place, chunks)[0]

    def most(self, chunks: int) -> int:
        """How many micro-batches the mini-batch makes of the only module, up to so many."""
        (taken,), (entry,) = self._found, self._entries
        return subject_of(taken, entry, chunks, self._microbatching).chunks

    @property
    def counts(self) -> bool:
        """Whether operations are counted, and nothing is computed."""
        return self._place.type == "meta"

    @property
    def _place(self) -> torch.device:
        """Where to measure."""
        if any(p.is_meta for taken in self._found for p in taken.root.parameters()):
            return torch.device("meta")  # they have no values yet, so nothing can be run
        return self.devices[0]

    @cached_property
    def _entries(self) -> Sequence[Entry]:
        return self._find()

    def _on(self, device: torch.device, chunks: int | None = None) -> list[ModelProfile]:
        entries = self._entries
        device = device if self._place.type != "meta" else self._place
        profiles = []
        for taken, entry in zip(self._found, entries, strict=True):
            beside = [each.module for each in self._found if each is not taken]
            subject = subject_of(taken, entry, chunks or self._chunks, self._microbatching, beside)
            with intra_op_threads(torch.get_num_threads() // len(self.devices)):
                found = profile_layers(subject, device, self._optimizer, split=self.split)
            profiles.append(found)
        return profiles


def profile(
    model: nn.Module,
    sample: Any,
    *,
    module: str | None = None,
    device: str | torch.device = "cpu",
    chunks: int = 1,
    microbatching: MicroBatching | None = None,
    optimizer: Optimizers = None,
    split_backward: bool = False,
) -> ModelProfile:
    """Measure what the layers of a model cost, one by one.

    Example::

        costs = profile(layers, x, device="cuda:0", chunks=8, optimizer=torch.optim.AdamW)
        costs.layers[3].backward.at(rows=4)  # seconds

    Each layer runs by itself on a micro-batch, several times, on shadows of its parameters and
    copies of its buffers, in its training mode and in the caller's autocast. The model may be
    larger than the device, and stays where it is. It is the same afterwards, its gradients and
    random generators included; hooks on layers are called.

    Args:
        model: The model.
        sample: A mini-batch as the model is called with: a tuple of arguments, a dict of named
            ones, or one argument. An nn.Sequential has one argument, which may be a tuple.
        module: The path of what is to run as a pipeline; None takes the model itself.
        device: Where to measure. On ``"meta"``, and for a model on the meta device, nothing is
            computed: operations are counted in the place of seconds.
        chunks: The number of micro-batches that the mini-batch makes.
        microbatching: How it is cut, see :class:`~lightning_gpipe.GPipe`.
        optimizer: An optimizer, its class, or a function that makes one of a list of parameters:
            tells the bytes that are kept for each parameter.
        split_backward: Whether to measure backwards in two parts, too.

    Raises:
        TypeError, ValueError: If the model cannot be cut, or an argument is wrong.
        BaseException: What a layer raises that cannot run on the sample, with a note.
    """
    check_chunks(chunks)
    check_microbatching(microbatching)
    taken = take(model, module)
    measuring = Measuring(
        [taken],
        lambda: entries_with([taken], sample),
        [device],
        chunks=chunks,
        microbatching=microbatching,
        optimizer=optimizer,
        split=split_backward,
    )
    return measuring.profiles[0]


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _total(profiles: Sequence[ModelProfile]) -> float:
    return sum(sum(each.times()) for each in profiles)
