"""One partition at work on a device, with what lasts from one mini-batch to the next.

A stage refers to no other stage; the activations of a mini-batch belong to its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful import (
    Attributes,
    DeferredStatistics,
    Gather,
    Journal,
    Manager,
    Norm,
    RowWatches,
    Shadows,
    StageState,
    modules_raising,
)
from lightning_gpipe.core.layout import (
    HOST,
    Layout,
    Partition,
    Slot,
    check_copies,
    check_whole,
    followed_slots,
    has_shards,
)
from lightning_gpipe.core.programs import Route, RouteName
from lightning_gpipe.core.run.backward.split import Splits
from lightning_gpipe.core.run.divided_weights import DividedWeights
from lightning_gpipe.core.skip import declaration_of

_TRAINING, _DEVICE = attrgetter("training"), attrgetter("device")


def training_flags_of(stages: Sequence[Stage | tuple[nn.Module, ...]]) -> bytes:
    """Return the training flags of all stages, or of their modules in other processes."""
    return b"".join(
        [
            stage.training_flags
            if isinstance(stage, Stage)
            else bytes([module.training for module in stage])
            for stage in stages
        ]
    )


class Stage:
    """A partition and the device on which it works.

    Attributes:
        last: Whether its outputs are the caller's.
        skip_bytes: The bytes of skip tensors that leave, in the latest micro-batch.
        followed: The slots of parameters whose home is another device.
        on_host: Whether the home of its weights is the memory of the host, and it is on a device.
        offloads: The number of micro-batches whose activations wait on the host at once, or inf.
        has_visits: Whether weights or activations are on its device only around their use.
        in_backward: Whether its modules have the copies of a backward that runs.
        watches: Watches for layers that mix rows, in the first mini-batches of a call signature.
        titled: The layers with their names in errors, such as ``layer 3 (Linear)``.
        embeddings: Those that may divide gradients by how often an index is in a mini-batch.
        gather: Gathers moments of its batch norms in all replicas; None if each has its own.
    """

    def __init__(
        self,
        layout: Layout,
        j: int,
        *,
        deferred_batch_norm: bool,
        offloads: float = 0,
    ) -> None:
        self.partition: Partition = layout.partitions[j]
        self.device: torch.device = layout.device_of(j)
        self._times_copied = 0
        self.in_backward = False
        self.offloads = offloads if self.device != HOST else 0
        self.last = j + 1 in {*layout.starts, layout.n}
        self.arriving: tuple[Route, ...] = layout.arriving(j)
        self.leaving: tuple[Route, ...] = layout.leaving(j)
        self.skip_bytes: dict[RouteName, int] = {}
        self.journal = Journal()
        self._deferred_batch_norm = deferred_batch_norm
        self.splits = Splits()
        self.gather: Gather | None = None
        self.divided: DividedWeights | None = None
        self._set_modules(self.partition.modules)
        self.follow(layout)

    def __str__(self) -> str:
        return f"stage {self.partition.index} ({self.partition}, {self.device})"

    def divide(self, weights: DividedWeights, layout: Layout) -> None:
        """Gather the weights that have no home here by the layout from replicas, from now on."""
        self.divided, self.has_visits = weights, True
        self.follow(layout)

    def follow(self, layout: Layout) -> None:
        """Find the parameters to follow; raise ValueError if a copy of one is not enough."""
        self.followed = followed_slots(self.modules, self.device, layout.homes)
        self.on_host = layout.placement[self.partition.index] in layout.away_from_weights
        self.has_visits = self.on_host or bool(self.offloads) or self.divided is not None
        check_copies(self.followed, self.device, layout.homes, on_host=self.on_host)

    def refresh(self) -> None:
        """Update :attr:`modules`, which the user may have changed since the last step."""
        self.journal.reset()  # changes that an interrupted mini-batch left
        modules = self.partition.modules
        if modules != self.modules:
            self._set_modules(modules)
        self.state.refresh()
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        if has_shards(modules, parameters):
            check_whole(self.partition.titled_layers, RuntimeError)
        if self.on_host:
            self._place_additions()
        if not {self.device}.issuperset(map(_DEVICE, parameters)):
            self._check_placement()

    def shadows(
        self,
        *,
        grad: bool,
        recomputed: bool,
        values: Mapping[int, Tensor] | None = None,
        by_caller: Callable[[], bool] | None = None,
    ) -> Shadows:
        """Make shadows for one mini-batch; ``values`` are of parameters without values here."""
        self._times_copied += bool(self.followed)
        return Shadows(
            self.modules,
            grad=grad,
            device=self.device,
            followed=self.followed,
            values=values,
            on_host=self.on_host,
            divided=self.divided is not None,
            examined=self._times_copied & (self._times_copied - 1) == 0,
            recomputed=recomputed,
            by_caller=by_caller,
        )

    def statistics(self) -> DeferredStatistics | None:
        return DeferredStatistics.of(self._norms, self.gather) if self._norms else None

    @property
    def edited_parameters(self) -> list[nn.Parameter | None]:
        """The frozen parameters that the layers are known to edit in forward."""
        slots = self.state.edited_parameters
        return [module._parameters.get(name) for module, name in slots]

    # A recomputation runs in the training mode of its forward, even after .train() or .eval().

    @property
    def training_flags(self) -> bytes:
        """A byte for each module: 1 if it is in training mode now."""
        return bytes(map(_TRAINING, self.modules))

    def training_as(self, flags: bytes) -> Manager:
        return self.journal.changed(
            (Attributes(module), "training", bool(training))
            for module, training in zip(self.modules, flags, strict=True)
            if module.training != training
        )

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter in the layers, such as ``layer 3.linear.weight``."""
        for title, layer in self.partition.titled_layers:
            for name, other in layer.named_parameters():
                if other is parameter:
                    return f"{title}.{name}"
        return "a parameter"

    def layer_raising(self, error: BaseException) -> str:
        """Name the innermost module that raised an error: ``, in layer 3.1 (Linear)``."""
        names = self._names
        raising = (m for m in modules_raising(error) if m in names)
        return next((f", in {names[m]} ({type(m).__name__})" for m in raising), "")

    @property
    def _names(self) -> dict[nn.Module, str]:
        layers = self.partition.titled_layers
        return {m: name for title, layer in layers for name, m in layer.named_modules(None, title)}

    def check_frequencies(self, m: int) -> None:
        """Raise ValueError if embeddings would count how often an index is in a micro-batch."""
        counting = [
            each
            for each in self.embeddings
            if each.scale_grad_by_freq and any(p.requires_grad for p in each.parameters())
        ]
        if counting:
            names = self._names
            raise ValueError(
                "scale_grad_by_freq=True needs whole mini-batches, because it divides a gradient "
                f"by how often its index is in one: got {m} micro-batches for "
                f"{', '.join(f'{names[each]} ({type(each).__name__})' for each in counting)}. "
                "Write scale_grad_by_freq=False, or chunks=1."
            )

    def _set_modules(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self.skips = any(declaration_of(module) is not None for module in modules)
        norms = [module for module in modules if isinstance(module, Norm)]
        self._norms = norms if self._deferred_batch_norm else []
        self.embeddings = [x for x in modules if isinstance(x, nn.Embedding | nn.EmbeddingBag)]
        self.state = StageState(modules, deferred=self._deferred_batch_norm)
        titles = self.partition.titled_layers
        self.titled = [(layer, f"{title} ({type(layer).__name__})") for title, layer in titles]
        self.watches = RowWatches(self.titled)

    def _place_additions(self) -> None:
        """Follow parameters that the user has added on the host; move buffers to the device."""
        added: dict[Slot, nn.Parameter] = {}
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device == HOST:
                    added[module, name] = parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device == HOST:
                    module._buffers[name] = buffer.to(self.device)
        if new := added.keys() - self.followed:
            homes = dict.fromkeys(added.values(), HOST)
            check_copies(new, self.device, homes, on_host=True)
            self.followed |= new

    def _check_placement(self) -> None:
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.device == self.device:
                    continue
                if (module, name) not in self.followed:
                    home = "the host (weights='host')" if self.on_host else self.device
                    raise RuntimeError(
                        f"the parameters of {self} must stay on {home}: found {name!r} of "
                        f"{type(module).__name__} on {parameter.device}. Something moved or "
                        "replaced it after the pipeline was set up; the pipeline places its layers "
                        "itself, so remove calls such as .to() or .cuda() on them."
                    )
