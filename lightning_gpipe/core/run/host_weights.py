"""Weights that live in the memory of the host, and are on a device only around their use.

So a model may be larger than all devices together. The copies on the device are the stage's shadows
of one mini-batch: their memory comes and goes, while the graphs of micro-batches keep the shadows.
What autograd saves of a weight for backward would keep the memory too, so it saves where it was
instead, and finds it in the copy that is there in backward.

All memory is that of the stream on which the stage computes. Copies run on streams of their own,
which wait for it: what is given back before is then free. The host waits for the copies at the end
of a phase, for the caller may change the weights after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import record_stream
from lightning_gpipe.core.faithful import Context, Manager, Shadows, add_note, placeholder
from lightning_gpipe.core.run.shared_parameters import Pair
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.schedules import Action, Row, weight_moves


class _SavedWeight(NamedTuple):
    """A tensor that autograd saves, as a view of the values of a weight."""

    weight: int
    view: tuple[Any, Any, Any]  # size, stride and offset


class HostWeights:
    """The weights of one stage in one mini-batch, whose home is the host.

    Args:
        stage: The stage, on a GPU.
        shadows: Its shadows, those of weights at home on the host without values yet.
    """

    def __init__(self, stage: Stage, shadows: Shadows) -> None:
        self._stage = stage
        self._device = stage.device
        self._pairs = shadows.hosted  # of tensors on the host and on the device
        self._weight_of: dict[int, int] = {}  # by the storage, while the values are on the device
        self._coming: torch.cuda.Event | None = None  # until the device waits for it
        self._under_way: list[torch.cuda.Event] = []  # until the host waits for them

    def load(self) -> None:
        """Begin to copy the weights to the device, beside what it computes."""
        try:
            for weight, copy in self._pairs:
                copy.data = torch.empty_like(weight, device=self._device, requires_grad=False)
        except torch.OutOfMemoryError as error:
            add_note(error, f"raised in loading the weights of {self._stage}")
            raise
        self._weight_of = {_storage(copy): k for k, (_, copy) in enumerate(self._pairs)}
        with self._beside("to the device"):
            for weight, copy in self._pairs:
                copy.data.copy_(weight.detach(), non_blocking=True)
        self._coming = self._under_way[-1]

    def await_values(self) -> None:
        """Let what the device computes from now on wait for the weights."""
        if self._coming is not None:
            torch.cuda.current_stream(self._device).wait_event(self._coming)
            self._coming = None

    def drop(self) -> None:
        """Give the memory back; what the device computes until now still finds the weights."""
        self.await_values()
        self._weight_of = {}
        for weight, copy in self._pairs:
            copy.data = placeholder(weight, self._device)

    def saving(self, context: Context) -> Manager:
        """Let autograd save no weights in a ``with`` block, beside the hooks of the caller."""
        pack, unpack = context.saved_tensors_hooks or (torch.Tensor.detach, _as_is)
        return torch.autograd.graph.saved_tensors_hooks(
            partial(self._pack, pack), partial(self._unpack, unpack)
        )

    def bring_home(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Begin to copy the gradients of weights to the host."""
        at_home = []
        with self._beside("to the host") as stream:
            for weight, gradient in pairs:
                if weight.device != gradient.device:
                    on_device, gradient = gradient, _to_host(gradient)
                    record_stream(on_device, stream)
                at_home.append((weight, gradient))
        return at_home

    def settle(self) -> None:
        """Let the host wait for all copies that are under way."""
        for event in self._under_way:
            event.synchronize()
        self._under_way.clear()

    def _beside(self, direction: str) -> _Beside:
        return _Beside(_stream(self._device, direction), self._under_way)

    def _pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        k = self._weight_of.get(_storage(tensor))
        if (
            k is None
            or tensor.dtype != self._pairs[k][1].dtype
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            return pack(tensor)
        return _SavedWeight(k, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def _unpack(self, unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
        if not isinstance(saved, _SavedWeight):
            return unpack(saved)
        if not self._weight_of:
            raise RuntimeError(
                f"backward through {self._stage} must come with the pipeline's: its weights are "
                "in the memory of the host, and on the device only while the stage runs. Let the "
                "layer return the tensor, or hand it out with loss_term(name, value)."
            )
        copy = self._pairs[saved.weight][1].detach()
        return copy.as_strided(*saved.view)


class WeightTraffic:
    """Moves the weights of one worker's stages as its row says."""

    def __init__(self, row: Row, weights: Mapping[int, HostWeights | None]) -> None:
        self._moves = weight_moves(row)
        self._weights = {j: each for j, each in weights.items() if each is not None}

    def before(self, action: Action) -> None:
        """Begin to load what the action and the next stage need, and wait for the former."""
        if moves := self._moves.get(action):
            for j in moves.loads:
                self._weights[j].load()
        self._weights[action.j].await_values()

    def after(self, action: Action) -> None:
        """Drop what is not needed soon."""
        if moves := self._moves.get(action):
            for j in moves.drops:
                self._weights[j].drop()


class _Beside:
    """Runs copies on a stream beside the current one, and records when they are done."""

    def __init__(self, stream: torch.cuda.Stream, under_way: list[torch.cuda.Event]) -> None:
        self._stream = stream
        self._under_way = under_way
        self._current = torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._current.__enter__()
        return self._stream

    def __exit__(self, *error: Any) -> None:
        self._current.__exit__(*error)
        self._under_way.append(self._stream.record_event())


@cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of a device for copies in a direction; a bus carries both at once."""
    return torch.cuda.Stream(device)


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; 0 for one that is made of other tensors."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _to_host(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        return gradient.cpu()
    at_home = torch.empty_like(gradient, device="cpu", pin_memory=True)
    return at_home.copy_(gradient, non_blocking=True)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor
