"""GPipe, the module that replaces the user's nn.Sequential.

It combines the parts of the package: it makes a layout of the user's layers, moves them to their
devices, and builds an engine from the layout and a transport. A forward splits its input into
micro-batches, has the engine run them by a schedule, and merges their outputs. What outlives a
forward belongs to the user (the layers) or to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_gpipe.core.data import (
    MicroBatching,
    Rows,
    check_chunks,
    check_microbatching,
    reduced,
    term_receiver,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.faithful import (
    Journal,
    check_batch_norms,
    is_traced,
    not_compiled,
    refuse_cached_parametrizations,
    refuse_function_transforms,
    rows_needed,
)
from lightning_gpipe.core.frontends import (
    StandIn,
    choose_devices,
    move,
    place,
    place_own,
    with_index,
)
from lightning_gpipe.core.plan import (
    ActivationCheckpointing,
    Layout,
    RouteName,
    Schedule,
    check_activation_checkpointing,
    check_sharing,
    count_recomputed,
    cut,
    fill_drain,
    lay_out,
)
from lightning_gpipe.core.profile import walk
from lightning_gpipe.core.run import Engine, Stage, Timeline
from lightning_gpipe.core.show import Table, skip_table, stage_table
from lightning_gpipe.core.skip import routes_of, skips_of
from lightning_gpipe.core.transport import InlineTransport, LocalTransport, Transport


class GPipe(StandIn):
    """Runs an nn.Sequential as a pipeline over several devices; used like the nn.Sequential.

    Example::

        layers = nn.Sequential(a, b, c, d)
        model = GPipe(layers, balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = F.mse_loss(model(x), y.to(model.devices[-1]))
        loss.backward()

    The layers stay the same objects under the same names, so the state dict is that of ``module``.
    Its hooks, and parameters and buffers of its own, are the pipeline's too: the hooks are called
    with the pipeline as the module, the tensors are moved to the last device. The layers are moved
    to their devices at once, and must stay there. A parameter that layers on several
    devices share is on the first of them, and the others follow it with copies. The input is split
    into micro-batches along dim 0, and their outputs are merged on the last device: see
    :class:`~lightning_gpipe.Rows`.

    Args:
        module: The layers.
        balance: The number of layers in each stage.
        devices: One device per worker, as strings or ``torch.device``. There may be fewer than
            stages: stage j is on device j mod d. None takes as many GPUs as divide the number of
            stages, or without a GPU one CPU thread for each stage.
        chunks: The number of micro-batches; a batch with fewer rows makes fewer.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, an integer k the first k.
        deferred_batch_norm: Whether batch norms update their running statistics once per mini-batch
            instead of once per micro-batch.
        microbatching: Another way to make micro-batches, such as ``Rows(dim=1)`` or
            :class:`~lightning_gpipe.PaddedSequences`. None splits along dim 0, with two rows or
            more in each micro-batch if there are batch norms.
        threads: Whether workers run on threads of their own. False runs everything on the calling
            thread in the schedule's order, for a debugger, as is always done on one device.

    Attributes:
        balance: As given.
        devices: One ``torch.device`` per worker.
        chunks: As given.
        activation_checkpointing: As given.
        microbatching: How a mini-batch is split into micro-batches.
        patches: The changes that a running verification has made in the layers.

    Raises:
        TypeError: If ``module`` is not an nn.Sequential, or an argument has the wrong type.
        ValueError: If the balance does not fit the module, or the devices do not fit the balance.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        devices: Sequence[str | torch.device] | None = None,
        chunks: int = 1,
        activation_checkpointing: ActivationCheckpointing = "except_last",
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        threads: bool = True,
    ) -> None:
        check_chunks(chunks)
        check_activation_checkpointing(activation_checkpointing)
        check_microbatching(microbatching)
        layout = _lay_out(module, balance, devices)
        super().__init__(module)
        if deferred_batch_norm:
            check_batch_norms(module)
        self.balance = list(balance)
        self.devices = list(layout.devices)
        self.chunks = chunks
        self.activation_checkpointing = activation_checkpointing
        self.microbatching = microbatching or Rows(at_least=rows_needed(module))
        self.patches = Journal()

        _place(module, layout)
        self._engine = Engine(
            layout, _connect(layout, threads=threads), deferred_batch_norm=deferred_batch_norm
        )

    @property
    def layout(self) -> Layout:
        """What runs where; prints as one line per stage."""
        return self._engine.layout

    @property
    def engine(self) -> Engine:
        """The engine, which runs the micro-batches."""
        return self._engine

    @property
    def timeline(self) -> Timeline | None:
        """What ran when in the latest mini-batch, or None before the first."""
        return self._engine.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._engine.timeline = timeline

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""
        return self._engine.stages

    @not_compiled
    def forward(self, input: Any) -> Any:
        """Run the layers on ``input`` in micro-batches, and return the merged output.

        Under ``torch.jit.trace``, ``torch.export`` and ``torch.fx``, which record the model, the
        layers run one after another on the whole ``input``.

        Args:
            input: What the first layer takes; any pytree with tensors of shape ``(rows, ...)``.

        Raises:
            TypeError: If ``input``, or the output of a stage, has tensors within other objects than
                pytrees and dataclasses.
            ValueError: If the tensors of ``input`` disagree on their number of rows, or layers mix
                the rows, as attention does with ``batch_first=False``.
            RuntimeError: If a parameter was moved from its stage's device, or a layer replaced.
            BaseException: Any error that a layer raises, with a note of where it happened.
        """
        if len(self.patches):
            with self._engine.exclusive():
                self.patches.reset()  # those that an interrupted verification left
        if is_traced(input, self.parameters()):
            self._check_layers()
            with self._engine.exclusive():
                return walk(self.stages, input, lambda _, layer, x: layer(x))
        return self.run(input)

    def run(self, input: Any) -> Any:
        """Run as :meth:`forward` does, with :attr:`patches` in force."""
        refuse_function_transforms()
        refuse_cached_parametrizations()
        self._check_layers()
        pieces = self.microbatching.split(input, self.chunks)
        microbatches = list(map(tree_flatten, pieces))
        m = len(microbatches)
        if m == 0:
            raise ValueError(
                f"{type(self.microbatching).__name__}.split must make at least one micro-batch: "
                "got none."
            )
        division = partial(self.microbatching.division, pieces)
        receiver = term_receiver()
        outputs, terms = self._engine.run(
            microbatches, self._schedule(m), division, terms=receiver is not None
        )
        if receiver is not None:
            for term in reduced(terms, division):
                receiver(term)
        return self.microbatching.merge(list(map(tree_unflatten, outputs)), input)

    def observe(self, observer: Callable[[Timeline], None]) -> RemovableHandle:
        """Call ``observer`` with the timeline of each mini-batch once its forward has ended.

        The backward is added to the timeline later. A step that runs the pipeline twice calls
        ``observer`` twice.

        Returns:
            A handle whose ``remove()`` ends the calls.
        """
        return self._engine.observe(observer)

    def share(self, parameters: Iterable[nn.Parameter], device: str | torch.device) -> None:
        """Make ``device`` the home of ``parameters`` that modules outside of the pipeline share.

        Stages on other devices follow them with copies. The home of parameters that only stages
        share is the device of the first of these stages; they need not be given here.
        """
        layout = self.layout.with_homes(dict.fromkeys(parameters, with_index(torch.device(device))))
        _move_home(layout)
        self._engine.layout = layout

    def listing(self) -> Table:
        """A table of the stages: their devices, layers, parameters and skips that leave them."""
        return stage_table(self.layout, self._skip_bytes())

    def skip_layout(self) -> Table:
        """A table of the skip connections: between which layers, and which stages they cross.

        Once a micro-batch has run, it has the bytes of those that are sent from stage to stage.
        """
        return skip_table(skips_of(self), self.layout.partitions, self._skip_bytes())

    def extra_repr(self) -> str:
        devices = [str(device) for device in self.devices]
        return (
            f"balance={self.balance}, devices={devices}, chunks={self.chunks}, "
            f"activation_checkpointing={self.activation_checkpointing!r}, "
            f"microbatching={self.microbatching!r}"
        )

    def close(self) -> None:
        """End the worker threads; the next forward starts new ones."""
        self._engine.close()

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(layer for partition in self.layout.partitions for layer in partition.layers)

    def __getitem__(self, index: int | slice) -> nn.Module:
        chosen = list(self)[index]
        return nn.Sequential(*chosen) if isinstance(chosen, list) else chosen

    def _schedule(self, m: int) -> Schedule:
        """The schedule of a mini-batch of ``m`` micro-batches."""
        recomputed = 0
        if torch.is_grad_enabled():
            recomputed = count_recomputed(self.activation_checkpointing, m)
        return fill_drain(m, self.layout.placement, recomputed=recomputed)

    def _skip_bytes(self) -> dict[RouteName, int]:
        return {name: size for stage in self.stages for name, size in stage.skip_bytes.items()}

    def _check_layers(self) -> None:
        """Raise if the module has other layers than those that were cut."""
        if len(self._modules) != len(list(self)):
            raise RuntimeError(
                f"the layers of a pipeline must stay the same: it was set up for {len(list(self))} "
                f"and has {len(self._modules)} now. Add or remove layers before setup."
            )
        for layer, (name, found) in zip(self, self._modules.items(), strict=True):
            if found is not layer:
                raise RuntimeError(
                    f"the layers of a pipeline must stay the same objects: layer {name!r} was "
                    f"{type(layer).__name__} when it was set up and is another "
                    f"{type(found).__name__} now. Replace layers before setup."
                )


def _lay_out(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[str | torch.device] | None
) -> Layout:
    """The layout, checked before anything is moved."""
    partitions = cut(module, balance)
    chosen = choose_devices(devices, len(partitions))
    layout = lay_out(partitions, chosen, routes_of(skips_of(module, partitions), partitions))
    check_sharing(layout)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return layout.with_homes(dict.fromkeys(own, layout.device_of(layout.n - 1)))


def _connect(layout: Layout, *, threads: bool) -> Transport:
    """A transport between the workers."""
    if threads and len(layout.devices) > 1:
        return LocalTransport(layout)
    return InlineTransport(layout)


def _place(module: nn.Sequential, layout: Layout) -> None:
    """Move the layers to their devices, and what only the module itself has to the last one."""
    place_own(module, layout.device_of(layout.n - 1))
    for j, partition in enumerate(layout.partitions):
        for layer in partition.layers:
            place(layer, layout.device_of(j))
    _move_home(layout)


def _move_home(layout: Layout) -> None:
    """Move parameters to their homes."""
    for parameter, device in layout.homes.items():
        if parameter.device != device:
            move(parameter, device)
