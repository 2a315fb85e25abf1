"""One partition at work on a device, with what lasts from one mini-batch to the next.

A stage does not refer to other stages, except in the routes of its skip tensors. What is alive
between a mini-batch's forward and its backward belongs to its pass, see
:mod:`~lightning_gpipe.core.run.stage_pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Division
from lightning_gpipe.core.faithful import (
    NO_VALUES,
    Attributes,
    Behavior,
    Behaviors,
    DeferredStatistics,
    Journal,
    Manager,
    Norm,
    RowWatch,
    RowWatches,
    Shadows,
    Snapshot,
    StageState,
    TrainingFlags,
)
from lightning_gpipe.core.plan import (
    Layout,
    Part,
    Partition,
    Route,
    RouteName,
    check_copies,
    check_whole,
    followed_slots,
    has_shards,
)
from lightning_gpipe.core.run.split import Splits
from lightning_gpipe.core.skip import declared_in


def modules_in(partition: Partition) -> tuple[nn.Module, ...]:
    """The layers and all modules within them, each once; written for speed."""
    found: dict[nn.Module, None] = {}
    waiting = list(partition.layers)[::-1]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in module._modules.values() if child is not None][::-1]
    return tuple(found)


class Stage:
    """A partition and the device on which it works.

    Args:
        layout: What runs where.
        j: The index of the stage.
        deferred_batch_norm: Whether batch norms update their statistics once per mini-batch.

    Attributes:
        partition: The layers.
        device: Where their parameters are.
        last: Whether its outputs are the caller's.
        arriving: The routes of skip tensors from other stages.
        leaving: The routes of skip tensors to other stages.
        skip_bytes: The bytes of those that leave, in the latest micro-batch.
        followed: The slots of parameters whose home is another device.
        modules: The layers and all modules within them.
        journal: The changes made to them while they run.
        skips: Whether any of them stashes or pops skip tensors.
        state: What they may change in forward.
        splits: How the backwards of its graphs are split.
        titled: The layers, each with what errors call it, such as ``layer 3 (Linear)``.
    """

    def __init__(self, layout: Layout, j: int, *, deferred_batch_norm: bool) -> None:
        self.partition: Partition = layout.partitions[j]
        self.device: torch.device = layout.device_of(j)
        self.last = j == layout.n - 1
        self.arriving: tuple[Route, ...] = layout.arriving(j)
        self.leaving: tuple[Route, ...] = layout.leaving(j)
        self.skip_bytes: dict[RouteName, int] = {}
        self.journal = Journal()
        self._deferred_batch_norm = deferred_batch_norm
        self._parts: WeakSet[Part] = WeakSet()
        self.splits = Splits()
        self._set_modules(self.modules_now())
        self.follow(layout)

    def __str__(self) -> str:
        return f"stage {self.partition.index} ({self.partition}, {self.device})"

    def follow(self, layout: Layout) -> None:
        """Find the parameters to follow, by their homes in ``layout``.

        Raises:
            ValueError: If a copy of one is not enough, see
                :func:`~lightning_gpipe.core.plan.check_copies`.
        """
        self.followed = followed_slots(self.modules, self.device, layout.homes)
        check_copies(self.followed, self.device, layout.homes)

    def refresh(self) -> None:
        """Update :attr:`modules`, which the user may have changed since the last step.

        Raises:
            RuntimeError: If a parameter was moved from the stage's device, or sharded.
        """
        self.journal.reset()  # changes that an interrupted mini-batch left
        modules = self.modules_now()
        if modules != self.modules:
            self._set_modules(modules)
        self.state.refresh()
        if has_shards(modules):
            layers = zip(self.partition.titles, self.partition.layers, strict=True)
            check_whole(layers, RuntimeError)
        self._check_placement()

    def modules_now(self) -> tuple[nn.Module, ...]:
        """The layers and all modules within them, each once."""
        return modules_in(self.partition)

    def shadows(
        self, *, grad: bool, recomputed: bool, values: Mapping[int, Tensor] = NO_VALUES
    ) -> Shadows:
        """Shadows for one mini-batch, given values of followed parameters that have none here."""
        return Shadows(
            self.modules,
            grad=grad,
            device=self.device,
            followed=self.followed,
            values=values,
            recomputed=recomputed,
        )

    def statistics(self) -> DeferredStatistics | None:
        """Where batch norms collect the statistics of one mini-batch, if they are deferred."""
        return DeferredStatistics.of(self._norms) if self._norms else None

    def snapshot(self, *, first: bool) -> Snapshot:
        """A snapshot of the state to run forward again; ``first``: nothing is known of it yet."""
        return self.state.snapshot(Behavior() if first else self._behaviors.all)

    def behavior(self, flags: TrainingFlags, structure: Hashable) -> Behavior:
        """The behavior of the layers with these training flags, for this structure of inputs."""
        return self._behaviors.of(flags, structure)

    @property
    def edited_parameters(self) -> list[nn.Parameter | None]:
        """The frozen parameters that the layers are known to edit in forward."""
        slots = self._behaviors.edited_parameters
        return [module._parameters.get(name) for module, name in slots]

    def has_run(self, part: Part) -> bool:
        """Whether an earlier mini-batch ran this part of a program; asked once in each."""
        if part in self._parts:
            return True
        self._parts.add(part)
        return False

    def watch(
        self, signature: Hashable, division: Callable[[], Division | None]
    ) -> RowWatch | None:
        """What notices layers that mix rows, in the first mini-batch of a call signature."""
        return self._watches.begin(signature, division)

    # A recomputation runs in the training mode of its forward, even after .train() or .eval().

    @property
    def training_flags(self) -> TrainingFlags:
        """Which of the modules are in training mode now."""
        return bytes([module.training for module in self.modules])

    def training_as(self, flags: TrainingFlags) -> Manager:
        """Set the training flags of the modules for the duration of a ``with`` block."""
        return self.journal.changed(
            (Attributes(module), "training", bool(training))
            for module, training in zip(self.modules, flags, strict=True)
            if module.training != training
        )

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name of a parameter in the layers, such as ``layer 3.linear.weight``."""
        for title, layer in zip(self.partition.titles, self.partition.layers, strict=True):
            for name, other in layer.named_parameters():
                if other is parameter:
                    return f"{title}.{name}"
        return "a parameter"

    def __getstate__(self) -> dict[str, Any]:
        # Programs are not copied, and a set of weak references cannot be.
        return {name: value for name, value in self.__dict__.items() if name != "_parts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = WeakSet()

    def _set_modules(self, modules: tuple[nn.Module, ...]) -> None:
        """Set :attr:`modules`, without any recorded behavior."""
        self.modules = modules
        self.skips = any(declared_in(module) is not None for module in modules)
        norms = [each for each in modules if isinstance(each, Norm)]
        self._norms = norms if self._deferred_batch_norm else []
        self.state = StageState(modules, deferred=self._deferred_batch_norm)
        self._behaviors = Behaviors()
        titles = zip(self.partition.titles, self.partition.layers, strict=True)
        self.titled = [(layer, f"{title} ({type(layer).__name__})") for title, layer in titles]
        self._watches = RowWatches(self.titled)

    def _check_placement(self) -> None:
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.device == self.device:
                    continue
                if (module, name) not in self.followed:
                    raise RuntimeError(
                        f"the parameters of {self} must stay on {self.device}: found {name!r} of "
                        f"{type(module).__name__} on {parameter.device}. Something moved or "
                        "replaced it after the pipeline was set up; the pipeline places its layers "
                        "itself, so remove calls such as .to() or .cuda() on them."
                    )
