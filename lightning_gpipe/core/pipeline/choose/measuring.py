"""Measurements of the costs of a model's units, made when a balance needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.balance import ModelProfile
from lightning_gpipe.core.data import MicroBatching, check_chunks, check_microbatching
from lightning_gpipe.core.faithful import intra_op_threads
from lightning_gpipe.core.layout import META
from lightning_gpipe.core.pipeline.choose.sampling import Entry, entries_with, subject_of
from lightning_gpipe.core.pipeline.piped_module import PipedModule, piped_module_at
from lightning_gpipe.core.profile import Optimizers, profile_layers
from lightning_gpipe.core.schedules import ActivationCheckpointing, check_activation_checkpointing


@dataclass(eq=False)
class LayerMeasurement:
    """Measures piped modules once, when their costs are needed.

    Args:
        entries: Returns the inputs of each module.
        devices: The devices of the stages; empty if they are not known.
        optimizer: The optimizer whose state counts.
        states: The share of its state that a device has, which replicas may divide.
        memory: The bytes of each device; empty if stages need not fit them.
        split: Whether backwards in two parts are measured, too.
        by_rows: Whether smaller micro-batches are measured, too, as for plans.
    """

    modules: Sequence[PipedModule]
    entries: Callable[[], Sequence[Entry]]
    devices: Sequence[torch.device]
    _: KW_ONLY
    chunks: int = 1
    activation_checkpointing: ActivationCheckpointing = "except_last"
    microbatching: MicroBatching | None = None
    optimizer: Optimizers = None
    states: float = 1.0
    memory: Sequence[float] = ()
    split: bool = False
    by_rows: bool = True
    done: list[ModelProfile] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_chunks(self.chunks)
        check_activation_checkpointing(self.activation_checkpointing)
        check_microbatching(self.microbatching)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        module: str | None,
        sample: Any,
        devices: Sequence[torch.device],
        **settings: Any,
    ) -> LayerMeasurement:
        modules = [piped_module_at(model, module)]
        return cls(modules, partial(entries_with, modules, sample), devices, **settings)

    @property
    def profiles(self) -> list[ModelProfile]:
        """The costs of each module, on the first device."""
        if not self.done:
            self.done = self.measure(self.devices[0])
        return self.done

    def speeds(self) -> list[float]:
        """Return the speed of each device relative to the first, measured if models differ."""
        kinds = dict(zip(map(_kind, self.devices), self.devices, strict=True))
        total, first = _total(self.profiles), _kind(self.devices[0])
        of_kind = {
            kind: 1.0 if kind == first else total / _total(self.measure(device))
            for kind, device in kinds.items()
        }
        return [of_kind[_kind(device)] for device in self.devices]

    def at(self, numbers: Sequence[int]) -> list[ModelProfile]:
        """Return the costs of the only module for each of several numbers of micro-batches."""
        (profiles,) = self._measured(self.devices[0], numbers)
        return profiles

    def most(self, chunks: int) -> int:
        """Return how many micro-batches the mini-batch of the only module makes, up to a number."""
        (piped,), (entry,) = self.modules, self._entries
        (number,) = subject_of(piped, entry, [chunks], self.microbatching).chunks.values()
        return number

    @cached_property
    def counts(self) -> bool:
        """True if operations are counted: the model or the first device has no values."""
        parameters = (p for piped in self.modules for p in piped.root.parameters())
        return self.devices[0].type == "meta" or any(p.is_meta for p in parameters)

    @cached_property
    def _entries(self) -> Sequence[Entry]:
        return self.entries()

    def measure(self, device: torch.device) -> list[ModelProfile]:
        return [profile for (profile,) in self._measured(device, [self.chunks])]

    def _measured(self, device: torch.device, numbers: Sequence[int]) -> list[list[ModelProfile]]:
        """Return the costs of each module for each number of micro-batches."""
        device = META if self.counts else device
        profiles = []
        for piped, entry in zip(self.modules, self._entries, strict=True):
            beside = [other.module for other in self.modules if other is not piped]
            subject = subject_of(
                piped, entry, numbers, self.microbatching, beside, by_rows=self.by_rows
            )
            with intra_op_threads(torch.get_num_threads() // len(self.devices)):
                profiles.append(profile_layers(subject, device, self.optimizer, split=self.split))
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
    """Measure the costs of the layers of a model, one by one.

    Example::

        costs = profile(layers, x, device="cuda:0", chunks=8, optimizer=torch.optim.AdamW)
        costs.layers[3].backward.at(rows=4)  # seconds

    Each layer runs by itself on a micro-batch, several times, in its training mode and in the
    caller's autocast. The model may be larger than the device, and stays where it is. Its
    parameters, gradients, buffers and the random generators do not change; hooks on layers are
    called.

    Args:
        model: The model.
        sample: A mini-batch: a tuple of arguments of the model, a dict of named ones, or one
            argument. An nn.Sequential has one argument, which may be a tuple.
        module: The path of the module to run as a pipeline; None takes the model itself.
        device: The device to measure on. On ``"meta"``, and for a model on the meta device, nothing
            is computed: operations are counted in the place of seconds.
        chunks: The number of micro-batches of the mini-batch.
        microbatching: How the mini-batch is cut, see :class:`~lightning_gpipe.GPipe`.
        optimizer: An optimizer, its class, or a function of a list of parameters that returns one:
            tells the bytes that are kept for each parameter.
        split_backward: Whether to measure backwards in two parts, too.

    Raises:
        TypeError, ValueError: If the model cannot be cut, or an argument is wrong.
        BaseException: The error of a layer that cannot run on the sample, with a note.
    """
    measuring = LayerMeasurement.of_model(
        model,
        module,
        sample,
        [torch.device(device)],
        chunks=chunks,
        microbatching=microbatching,
        optimizer=optimizer,
        split=split_backward,
    )
    return measuring.profiles[0]


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _total(profiles: Sequence[ModelProfile]) -> float:
    return sum(sum(profile.times()) for profile in profiles)
