"""Random numbers that are the same on recomputation and under any timing of threads.

A recomputed forward must draw the numbers of the first one. The usual answer is to save the state
of the generator before the forward and restore it for the recomputation. That is enough if each
generator is used by one worker only, as on CUDA, where each device has its own.

On CPU all threads of a process share one generator. Workers that draw from it get numbers that
depend on how the operating system schedules them, and one that restores the state does so while
others draw. So on CPU layers do not draw from the shared generator: each (micro-batch, stage) has a
private generator, seeded from the state of the shared one.

# Note [Drawing from private generators]
PyTorch has no default generator per thread, so a dispatch mode passes the private generator to the
operators that draw. `torch.compile` ignores the mode while it compiles; the mode sees the operators
that the compiled code calls. It costs microseconds per operator, and many models draw nothing. So
it is active in the first mini-batch of each training mode, and later only if that one drew. A model
that draws for the first time after that, such as one whose dropout starts at p = 0, changes the
state of the shared generator, which is checked once per mini-batch: then the state is restored, and
the forward is run again with the dispatch mode. What the first run changed is undone (buffers,
inputs edited in place), except what layers did in Python.

The shared generator advances by one draw for a mini-batch that draws, and not at all for one that
does not: a model without dropout gets the same shuffled batches as in a plain run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.faithful.managers import Manager


def default_generator(device: torch.device) -> Generator:
    """The generator from which operators on ``device`` draw by default."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class OwnGenerators:
    """The generators that only one worker uses: their states are saved and restored."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = [default_generator(device) for device in devices]
        self._states: dict[int, list[Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._generators)

    def save(self, i: int) -> None:
        """Save the states before micro-batch ``i``."""
        if self:
            self._states[i] = self.states()

    def replaying(self, i: int) -> Manager:
        """Draw from the saved states in a ``with`` block, and restore the present ones after it."""
        return _Replaying(self, self._states.pop(i))

    def states(self) -> list[Tensor]:
        """The present states."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: list[Tensor]) -> None:
        """Set the states."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Replaying:
    """Sets generators to other states for the duration of a ``with`` block."""

    def __init__(self, generators: OwnGenerators, states: list[Tensor]) -> None:
        self._generators = generators
        self._states = states

    def __enter__(self) -> None:
        self._before = self._generators.states()
        self._generators.restore(self._states)

    def __exit__(self, *error: object) -> None:
        self._generators.restore(self._before)


class PrivateGenerators:
    """A generator for each micro-batch of one stage, which no other thread draws from.

    Attributes:
        devices: The devices whose default generators they replace.
        grad: Whether the stage runs with gradients.
        drew: Whether anything was drawn so far.
    """

    def __init__(
        self, seed: bytes, j: int, devices: Iterable[torch.device], *, grad: bool = False
    ) -> None:
        self.devices = frozenset(devices)
        self.grad = grad
        self.drew = False
        self._seed = seed
        self._j = j

    def drawing(self, i: int) -> Manager:
        """Redirect draws to the generator of micro-batch ``i``, newly seeded."""
        digest = blake2b(self._seed + f"{i},{self._j}".encode(), digest_size=8).digest()
        return _RedirectedDraws(int.from_bytes(digest), self)


class Randomness:
    """Where a stage's random numbers come from while it runs one mini-batch.

    Args:
        own: The generators that only the stage's worker uses.
        private: The generators that replace those shared with other workers, or None to draw from
            the shared ones.
    """

    def __init__(self, own: OwnGenerators, private: PrivateGenerators | None) -> None:
        self._own = own
        self._private = private

    @property
    def drew(self) -> bool:
        """Whether the stage drew from private generators."""
        return self._private is not None and self._private.drew

    @property
    def redirected(self) -> bool:
        """Whether the stage has private generators."""
        return self._private is not None

    def save(self, i: int) -> None:
        """Save the states before the first forward of micro-batch ``i``, for its recomputation."""
        self._own.save(i)

    def drawing(self, i: int) -> list[Manager]:
        """The context managers for the first forward of micro-batch ``i``."""
        return [] if self._private is None else [self._private.drawing(i)]

    def replaying(self, i: int) -> list[Manager]:
        """The context managers for the recomputation, which draws the same numbers again."""
        own: list[Manager] = [self._own.replaying(i)] if self._own else []
        return own + self.drawing(i)


class SharedGenerators:
    """The generators that several workers share, compared before and after a mini-batch."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = frozenset(devices)
        self._generators = [default_generator(device) for device in self._devices]
        self._before = [generator.get_state() for generator in self._generators]

    def private(self, j: int, *, grad: bool = False) -> PrivateGenerators:
        """The generators of stage ``j``; ``grad``: whether it runs with gradients."""
        return PrivateGenerators(self._seed, j, self._devices, grad=grad)

    @cached_property
    def _seed(self) -> bytes:
        return blake2b(b"".join(bytes(state.numpy()) for state in self._before)).digest()

    def moved(self) -> bool:
        """Whether anything was drawn from the generators themselves."""
        return not all(map(torch.equal, self._before, (g.get_state() for g in self._generators)))

    def rewind(self) -> None:
        """Restore the states from before the mini-batch."""
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)

    def advance(self) -> None:
        """Advance the generators by one draw, so that the next mini-batch draws other numbers."""
        for device, generator in zip(self._devices, self._generators, strict=True):
            torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)


class _RedirectedDraws(TorchDispatchMode):
    """Makes operators draw from private generators."""

    # Held while the default generator of a device has a private state, for one draw.
    _lock = threading.Lock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` ignore the mode while it compiles, not when its code runs."""
        return True

    def __init__(self, seed: int, private: PrivateGenerators) -> None:
        self.supports_higher_order_operators = True
        super().__init__()
        self._seed = seed
        self._private = private
        self._generators: dict[torch.device, Generator] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*map(self._redirected, args), **kwargs)
        if not _may_draw(func) or not _draws_now(func, args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        default = default_generator(device)
        if device not in self._private.devices or not _same(kwargs.get("generator"), default):
            return func(*args, **kwargs)

        if self._private.grad:
            _refuse_checkpointing()
        private = self._generator(device)
        if _takes_generator(func):
            self._private.drew = True
            return func(*args, **{**kwargs, "generator": private})
        with self._lock:
            before, own = default.get_state(), private.get_state()
            default.set_state(own)
            try:
                return func(*args, **kwargs)
            finally:
                private.set_state(default.get_state())
                default.set_state(before)
                self._private.drew |= not torch.equal(own, private.get_state())

    def _redirected(self, argument: Any) -> Any:
        """A function among the arguments of an operator, such as a branch, as one in this mode."""
        if not callable(argument) or isinstance(argument, Tensor):
            return argument

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return run

    def _generator(self, device: torch.device) -> Generator:
        if device not in self._generators:
            self._generators[device] = Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _refuse_checkpointing() -> None:
    """Raise if a layer draws within a ``torch.utils.checkpoint`` of its own.

    That would restore the state of the shared generator and draw from it: another mask.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    reentrant = not torch.is_grad_enabled() and _called_by("torch.utils.checkpoint")
    if reentrant or (hooks is not None and _module_of(hooks[0]) == "torch.utils.checkpoint"):
        raise RuntimeError(
            "a layer must not draw random numbers under torch.utils.checkpoint in a pipeline whose "
            "workers share a generator, as all do on the CPU: its backward would draw others. Use "
            "the pipeline's activation_checkpointing instead, or checkpoint only what does not "
            "draw."
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


def _same(generator: Generator | None, default: Generator) -> bool:
    # The dispatcher makes a new Python object for the same C++ generator.
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
