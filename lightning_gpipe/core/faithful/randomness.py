"""Random numbers that are the same on recomputation and under any timing of threads.

A recomputed forward must draw the numbers of the first one. The usual answer is to save the state
of the generator before the forward and put it back for the recomputation. That is enough while a
generator belongs to one worker, as on CUDA, where each device has its own.

On CPU all threads of a process share one generator. Workers that draw from it take their numbers in
the order in which the operating system runs them, and one that puts its state back does so under
the feet of the others. So there, what a layer draws does not come from the shared generator: each
(micro-batch, stage) has a stream of its own, seeded from the shared generator's state.

# Note [Drawing from a private stream]
PyTorch has no default generator per thread, so draws are redirected as operators, by a dispatch
mode that hands them the stream's generator. A dispatch mode costs microseconds for every operator
and keeps `torch.compile` from compiling, while most stages draw nothing. So a stage is left alone
until something was drawn: that has moved the shared generator, which is looked at once per
mini-batch. The pipeline then puts the generator back and runs the forward again with the mode
around every stage; from then on it is around those that drew, in the training mode in which they
did. So a model with dropout runs its first forward twice, any other never. What the first of the
two changed is undone (buffers, inputs edited in place), save what it did in Python.

The shared generator moves on by one draw for a mini-batch in which something was drawn, and not at
all for one in which nothing was: a model without dropout sees the shuffled batches of a plain run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.faithful.managers import Manager


def default_generator(device: torch.device) -> Generator:
    """The generator from which operators on ``device`` draw unless told otherwise."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class OwnGenerators:
    """The generators that one worker has to itself: their states are saved and put back."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = [default_generator(device) for device in devices]
        self._states: dict[int, list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._generators)

    def note(self, i: int) -> None:
        """Note the state before micro-batch ``i``, which draws as usual."""
        if self:
            self._states[i] = self._snapshot()

    @contextmanager
    def replaying(self, i: int) -> Iterator[None]:
        """Draw from the state that was noted, and leave the generators as they were."""
        now = self._snapshot()
        self._restore(self._states.pop(i))
        try:
            yield
        finally:
            self._restore(now)

    def _snapshot(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class PrivateStreams:
    """A stream of numbers for each micro-batch of one stage, whatever other threads draw.

    Attributes:
        drew: Whether anything was drawn so far.
    """

    def __init__(
        self, seed: bytes, j: int, devices: Iterable[torch.device], *, grad: bool = False
    ) -> None:
        self._seed = seed
        self._j = j
        self._grad = grad
        self._devices = frozenset(devices)
        self.drew = False

    @contextmanager
    def drawing(self, i: int) -> Iterator[None]:
        """Redirect what is drawn to the stream of micro-batch ``i``, from its beginning."""
        digest = blake2b(self._seed + f"{i},{self._j}".encode(), digest_size=8).digest()
        with _PrivateStream(int.from_bytes(digest), self._devices, grad=self._grad) as stream:
            yield
        self.drew |= stream.drew


class Randomness:
    """Where a stage's random numbers come from while it runs one mini-batch.

    Args:
        own: The generators of the stage's worker.
        streams: What stands in for the generators that it shares, or None for a stage that is
            taken to draw nothing.
    """

    def __init__(self, own: OwnGenerators, streams: PrivateStreams | None) -> None:
        self._own = own
        self._private = streams

    @property
    def drew(self) -> bool:
        """Whether the stage drew from streams of its own."""
        return self._private is not None and self._private.drew

    @property
    def private(self) -> bool:
        """Whether the stage has streams of its own."""
        return self._private is not None

    def note(self, i: int) -> None:
        """Before the first forward of a micro-batch ``i`` that will be recomputed."""
        self._own.note(i)

    def drawing(self, i: int) -> list[Manager]:
        """What to enter around the first forward of micro-batch ``i``, if anything."""
        return [] if self._private is None else [self._private.drawing(i)]

    def replaying(self, i: int) -> list[Manager]:
        """What to enter around the recomputation, which draws the same numbers once more."""
        found: list[Manager] = [self._own.replaying(i)] if self._own else []
        if self._private is not None:
            found.append(self._private.drawing(i))
        return found


class SharedGenerators:
    """The generators that several workers share, looked at before and after a mini-batch."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = frozenset(devices)
        self._generators = [default_generator(device) for device in self._devices]
        self._before = [generator.get_state() for generator in self._generators]

    def streams(self, j: int, *, grad: bool = False) -> PrivateStreams:
        """The streams of stage ``j``; ``grad``: whether it runs with gradients."""
        return PrivateStreams(self._seed, j, self._devices, grad=grad)

    @cached_property
    def _seed(self) -> bytes:
        return blake2b(b"".join(bytes(state.numpy()) for state in self._before)).digest()

    def moved(self) -> bool:
        """Whether anything was drawn from the generators themselves."""
        return not all(map(torch.equal, self._before, (g.get_state() for g in self._generators)))

    def rewind(self) -> None:
        """Put the generators back to where they were."""
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)

    def advance(self) -> None:
        """Move the generators on by one draw, so that the next mini-batch has other numbers."""
        for device, generator in zip(self._devices, self._generators, strict=True):
            torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)


class _PrivateStream(TorchDispatchMode):
    """Makes operators on ``devices`` draw from generators of its own."""

    # Guards the default generator of a device for the length of one draw.
    _lock = threading.Lock()

    def __init__(self, seed: int, devices: frozenset[torch.device], *, grad: bool = False) -> None:
        super().__init__()
        self._grad = grad
        self._seed = seed
        self._devices = devices
        self._generators: dict[torch.device, Generator] = {}
        self.drew = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _may_draw(func) or not _draws_now(func, args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        default = default_generator(device)
        if device not in self._devices or not _is(kwargs.get("generator"), default):
            return func(*args, **kwargs)

        if self._grad:
            _refuse_checkpointing()
        stream = self._stream(device)
        if _takes_generator(func):
            self.drew = True
            return func(*args, **{**kwargs, "generator": stream})
        with self._lock:
            before, own = default.get_state(), stream.get_state()
            default.set_state(own)
            try:
                return func(*args, **kwargs)
            finally:
                stream.set_state(default.get_state())
                default.set_state(before)
                self.drew |= not torch.equal(own, stream.get_state())

    def _stream(self, device: torch.device) -> Generator:
        if device not in self._generators:
            self._generators[device] = Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _refuse_checkpointing() -> None:
    """Raise if a layer draws under a checkpointing of its own.

    It would put the state of the shared generator back and draw from that: another mask.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    reentrant = not torch.is_grad_enabled() and _called_by("torch.utils.checkpoint")
    if reentrant or (hooks is not None and _module_of(hooks[0]) == "torch.utils.checkpoint"):
        raise RuntimeError(
            "a layer must not draw random numbers under torch.utils.checkpoint in a pipeline whose "
            "workers share a generator, as all do on the CPU: its backward would draw others. Use "
            "the pipeline's activation_checkpointing instead, or checkpoint what does not draw."
        )


def _module_of(function: Any) -> str | None:
    return getattr(function, "__module__", None)


def _called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def _is(generator: Generator | None, default: Generator) -> bool:
    # The dispatcher wraps generators anew, so the objects differ where what they wrap does not.
    return generator is None or generator._cdata == default._cdata  # type: ignore[attr-defined]


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _draws_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False for attention kernels, tagged as drawing, that were given no dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given > 0)
    return True


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where the operator draws: its device argument, or its first tensor's device."""
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    return torch.device(device)
