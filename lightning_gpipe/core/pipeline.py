"""GPipe, the module in the place of the user's nn.Sequential.

This is where the parts meet. A forward cuts its input into micro-batches, lets them run through the
stages by the schedule, ties their outputs into the caller's graph and merges them; everything that
must outlive it is either the user's (the layers) or belongs to one mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from lightning_gpipe.core.data import MicroBatching, Rows, tree_flatten, tree_unflatten
from lightning_gpipe.core.faithful import (
    Journal,
    check_batch_norms,
    refuse_cached_parametrizations,
    refuse_function_transforms,
    rows_needed,
)
from lightning_gpipe.core.frontends import move, place
from lightning_gpipe.core.plan import (
    Mode,
    check_mode,
    check_sharing,
    count_recomputed,
    cut,
    fill_drain,
    homes,
    places_away,
)
from lightning_gpipe.core.run import MiniBatch, Stage, Timeline, attach
from lightning_gpipe.core.show import Table, listing, skip_table
from lightning_gpipe.core.skip import Route, SkipName, routes_of, skips_of
from lightning_gpipe.core.transport import LocalTransport


class GPipe(nn.Module):
    """Runs an nn.Sequential as a pipeline over several devices; used like the nn.Sequential.

    Example::

        layers = nn.Sequential(a, b, c, d)
        model = GPipe(layers, balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = F.mse_loss(model(x), y.to(model.devices[-1]))
        loss.backward()

    The layers stay the same objects under the same names, so the state dict is that of ``module``.
    They are moved to their devices at once, and must stay there. A parameter that layers on several
    devices share lives on the first of them, and the others follow it with copies. The input is cut
    into micro-batches along dim 0, and the output is whole again, on the last device: see
    :class:`~lightning_gpipe.Rows`.

    Args:
        module: The layers.
        balance: The number of layers in each stage.
        devices: One device per worker, as strings or ``torch.device``. There may be fewer than
            stages: stage j is on device j mod d. None takes as many GPUs as there are stages, or
            without a GPU one CPU thread for each stage.
        chunks: The number of micro-batches; a batch with fewer rows makes fewer.
        activation_checkpointing: Which micro-batches drop their activations in forward and run it
            again in backward: ``"always"`` all, ``"except_last"`` all but the last, ``"never"``
            none, a number the first so many.
        deferred_batch_norm: Whether batch norms update their running statistics once per mini-batch
            instead of once per micro-batch.
        microbatching: Another way to make micro-batches, such as
            :class:`~lightning_gpipe.PaddedSequences`. None cuts along dim 0, with two rows or more
            in each micro-batch if there are batch norms.
        threads: Whether workers run on threads of their own. False runs everything on the calling
            thread in the schedule's order, for a debugger. With one device it is always so.

    Attributes:
        balance: As given.
        devices: One ``torch.device`` per worker.
        chunks: As given.
        activation_checkpointing: As given.
        microbatching: How a mini-batch becomes micro-batches.
        timeline: What ran when in the latest mini-batch, or None before the first.
        patches: What a verification has changed in the layers while it runs.

    Raises:
        TypeError: If ``module`` is no nn.Sequential, or an argument has the wrong type.
        ValueError: If the balance does not fit the module, or the devices do not fit the balance.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        devices: Sequence[str | torch.device] | None = None,
        chunks: int = 1,
        activation_checkpointing: Mode = "except_last",
        deferred_batch_norm: bool = True,
        microbatching: MicroBatching | None = None,
        threads: bool = True,
    ) -> None:
        super().__init__()
        check_chunks(chunks)
        check_mode(activation_checkpointing)
        check_microbatching(microbatching)
        partitions = cut(module, balance)
        if deferred_batch_norm:
            check_batch_norms(module)
        self.balance = list(balance)
        self.devices = choose_devices(devices, len(partitions))
        self.chunks = chunks
        self.activation_checkpointing = activation_checkpointing
        self.microbatching = microbatching or Rows(at_least=rows_needed(module))
        self.timeline: Timeline | None = None

        placed = [self.devices[j % len(self.devices)] for j in range(len(partitions))]
        check_sharing(partitions, placed)
        routes = routes_of(skips_of(module, partitions), partitions)
        self._threads = threads
        self.patches = Journal()
        self._stages = [
            Stage(partition, device, deferred_batch_norm=deferred_batch_norm, routes=routes)
            for partition, device in zip(partitions, placed, strict=True)
        ]
        self._transport = LocalTransport(len(partitions), self.devices)
        for stage in self._stages:
            for layer in stage.partition.layers:
                place(layer, stage.device)
        self._homes: dict[nn.Parameter, torch.device] = {}
        self._settle(homes(partitions, placed))
        # The same layers under the same names; nn.Sequential has no empty places.
        self._modules = cast(dict[str, nn.Module | None], module._modules)
        self.__dict__["_module"] = module  # past nn.Module, which would make it a child

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""
        return tuple(self._stages)

    def forward(self, input: Any) -> Any:
        """Run the layers on ``input`` in micro-batches, and return what they return for all of it.

        Args:
            input: What the first layer takes; any pytree with tensors of shape ``(rows, ...)``.

        Raises:
            TypeError: If ``input``, or what a layer returns, has tensors where none are looked for.
            ValueError: If the tensors of ``input`` disagree on their number of rows.
            RuntimeError: If a parameter was moved from its stage's device, or a layer replaced.
            BaseException: Whatever a layer raises, with a note of where it happened.
        """
        self.patches.undo()  # those that an interrupted verification left
        return self.run(input)

    def run(self, input: Any) -> Any:
        """Do what :meth:`forward` does, with :attr:`patches` in force."""
        refuse_function_transforms()
        refuse_cached_parametrizations()
        self._check_layers()
        microbatches = list(map(tree_flatten, self.microbatching.split(input, self.chunks)))
        m = len(microbatches)
        if m == 0:
            raise ValueError(
                f"{type(self.microbatching).__name__}.split must make at least one micro-batch: "
                "got none."
            )
        recomputed = 0
        if torch.is_grad_enabled():
            recomputed = count_recomputed(self.activation_checkpointing, m)
        schedule = fill_drain(
            m, len(self._stages), workers=len(self.devices), recomputed=recomputed
        )
        minibatch = MiniBatch(
            self._stages,
            self.devices,
            schedule,
            recomputed=recomputed,
            transport=self._transport,
            threads=self._threads,
        )
        outputs = minibatch.forward(microbatches)
        self.timeline = minibatch.timeline
        attached = attach(minibatch, microbatches, outputs)
        return self.microbatching.merge(list(map(tree_unflatten, attached)), input)

    def share(self, parameters: Iterable[nn.Parameter], device: str | torch.device) -> None:
        """Let ``parameters`` live on ``device``, where modules around the pipeline use them too.

        Stages on other devices follow them with copies. Parameters that stages share with one
        another need no word: they live on the device of the first.
        """
        self._settle(dict.fromkeys(parameters, _with_index(torch.device(device))))

    def listing(self) -> Table:
        """A table of the stages: their devices, layers, parameters and skips that leave them."""
        leaving = [
            "\n".join(
                f"{route.target}: {route.name}{_size(stage, route)}" for route in stage.leaving
            )
            for stage in self._stages
        ]
        return listing(
            [stage.partition for stage in self._stages],
            [stage.device for stage in self._stages],
            leaving if any(leaving) else (),
        )

    def skip_layout(self) -> Table:
        """A table of the skip connections: between which layers, and which stages they cross.

        Once a micro-batch has run, with the bytes of those that go from stage to stage.
        """
        return skip_table(skips_of(self), [stage.partition for stage in self._stages], self._bytes)

    def extra_repr(self) -> str:
        devices = [str(device) for device in self.devices]
        return (
            f"balance={self.balance}, devices={devices}, chunks={self.chunks}, "
            f"activation_checkpointing={self.activation_checkpointing!r}, "
            f"microbatching={self.microbatching!r}"
        )

    def close(self) -> None:
        """End the worker threads; the next forward starts new ones."""
        self._transport.close()

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(layer for stage in self._stages for layer in stage.partition.layers)

    def __getitem__(self, index: int | slice) -> nn.Module:
        found = list(self)[index]
        return nn.Sequential(*found) if isinstance(found, list) else found

    @property
    def _sequential(self) -> nn.Sequential:
        module: nn.Sequential = self.__dict__["_module"]
        return module

    # A module may have names with dots in them, and know which keys are theirs.

    @override
    def get_submodule(self, target: str) -> nn.Module:
        return self._sequential.get_submodule(target) if target else self

    @override
    def _load_from_state_dict(self, *args: Any) -> None:
        self._sequential._load_from_state_dict(*args)

    def _settle(self, homes: Mapping[nn.Parameter, torch.device]) -> None:
        """Move parameters to their homes, and let the stages elsewhere follow them."""
        self._homes |= homes
        for parameter, device in homes.items():
            if parameter.device != device:
                move(parameter, device)
        for stage in self._stages:
            stage.followed = places_away(stage.modules, stage.device, self._homes)

    @property
    def _bytes(self) -> dict[SkipName, int]:
        return {name: size for stage in self._stages for name, size in stage.skip_bytes.items()}

    def _check_layers(self) -> None:
        """Raise if the module has other layers than those that were cut."""
        if len(self._modules) != len(list(self)):
            raise RuntimeError(
                f"the layers of a pipeline must stay the same: it was set up for {len(list(self))} "
                f"and has {len(self._modules)} now. Add or remove layers before."
            )
        for layer, (name, found) in zip(self, self._modules.items(), strict=True):
            if found is not layer:
                raise RuntimeError(
                    f"the layers of a pipeline must stay the same objects: layer {name!r} was "
                    f"{type(layer).__name__} when it was set up and is another "
                    f"{type(found).__name__} now. Replace layers before."
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "timeline": None}


def check_chunks(chunks: int) -> None:
    """Raise if ``chunks`` is no number of micro-batches."""
    if isinstance(chunks, bool) or not isinstance(chunks, int):
        raise TypeError(f"chunks must be an integer, the number of micro-batches: got {chunks!r}.")
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, the number of micro-batches: got {chunks}.")


def check_microbatching(microbatching: MicroBatching | None) -> None:
    """Raise if this cannot split and merge."""
    if microbatching is not None and not isinstance(microbatching, MicroBatching):
        raise TypeError(
            "microbatching must be an instance of a subclass of lightning_gpipe.MicroBatching, or "
            f"None: got {microbatching!r}."
        )


def choose_devices(devices: Sequence[str | torch.device] | None, stages: int) -> list[torch.device]:
    """One device per worker for a pipeline of so many stages.

    Raises:
        ValueError: If the number of devices does not divide the number of stages.
    """
    if devices is None:
        found = torch.cuda.device_count()
        chosen = [torch.device("cuda", k) for k in range(min(found, stages))]
        chosen = chosen or [torch.device("cpu")] * stages
    else:
        chosen = [torch.device(device) for device in devices]
    if not chosen or stages % len(chosen):
        raise ValueError(
            "the number of stages must be a multiple of the number of devices, so that each has as "
            f"many: got {stages} stages for {len(chosen)} devices {[str(d) for d in chosen]}. Give "
            f"{stages} devices, or a balance with another number of stages."
        )
    return list(map(_with_index, chosen))


def _size(stage: Stage, route: Route) -> str:
    """How large a skip tensor was in the latest micro-batch, if one has run."""
    size = stage.skip_bytes.get(route.name)
    return "" if size is None else f" ({size:,} B)"


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
