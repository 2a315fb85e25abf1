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
attributes, inputs edited in place), except what layers did elsewhere.

What is drawn in backward, as by a hook that adds noise to a gradient, comes from other private
generators in the same way. But a backward cannot be run again, so if a model draws there for the
first time after a backward that did not, the numbers are valid but depend on timing: a warning.

The mode sees operators only. A custom one that draws must be tagged as one that does, and functions
in C++ are not seen at all. Both draw from the shared generator, which is checked for it.

The shared generator advances by one draw for a forward or a backward that draws, and not at all for
one that does not: a model without dropout gets the same shuffled batches as in a plain run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_gpipe.core.faithful.library_generators import LibraryGenerators
from lightning_gpipe.core.faithful.managers import NOTHING, Manager
from lightning_gpipe.core.faithful.redirect import PrivateGenerators, default_generator

# Draws from private generators, from the shared ones themselves, and by untagged operators.
_DREW, _MOVED, _UNTAGGED = 1, 2, 4


class OwnGenerators:
    """The generators that only one worker uses: their states are saved and restored.

    Args:
        devices: The devices whose default generators they are.
        library: Those of Python and NumPy, if all stages run on one thread.
    """

    def __init__(
        self, devices: Iterable[torch.device], library: LibraryGenerators | None = None
    ) -> None:
        self._generators: list[Generator | LibraryGenerators] = [
            default_generator(device) for device in devices
        ]
        if library is not None:
            self._generators.append(library)
        self._states: dict[int, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._generators)

    def save(self, i: int) -> None:
        """Save the states before micro-batch ``i``."""
        if self._generators:
            self._states[i] = self.states()

    def replaying(self, i: int) -> Manager:
        """Draw from the saved states in a ``with`` block, and restore the present ones after it."""
        return _Replaying(self, self._states.pop(i))

    def states(self) -> list[Any]:
        """The present states."""
        return [generator.get_state() for generator in self._generators]

    def restore(self, states: list[Any]) -> None:
        """Set the states."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _Replaying:
    """Sets generators to other states for the duration of a ``with`` block."""

    def __init__(self, generators: OwnGenerators, states: list[Any]) -> None:
        self._generators = generators
        self._states = states

    def __enter__(self) -> None:
        self._before = self._generators.states()
        self._generators.restore(self._states)

    def __exit__(self, *error: object) -> None:
        self._generators.restore(self._before)


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
        self._in_backward: PrivateGenerators | None = None

    def begin_backward(self, private: PrivateGenerators | None) -> None:
        """Set the generators that replace the shared ones in backward."""
        self._in_backward = private

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

    def drawing_in_backward(self, i: int) -> Manager:
        """The context manager for the backward of micro-batch ``i``."""
        return NOTHING if self._in_backward is None else self._in_backward.drawing(i)

    def replaying(self, i: int) -> list[Manager]:
        """The context managers for the recomputation, which draws the same numbers again."""
        own: list[Manager] = [self._own.replaying(i)] if self._own else []
        return own + self.drawing(i)


class SharedGenerators:
    """The generators that several workers share, compared before and after a mini-batch.

    Workers of other processes use generators of their own, in the same state. What they did to them
    is heard of, and counts like what was done here.

    Args:
        devices: The devices whose default generators they are.
        but_for: Older :attr:`states`. To have one of them means that nothing was drawn: a layer
            with checkpointing of its own set it.
    """

    def __init__(
        self, devices: Iterable[torch.device], *, but_for: tuple[bytes, ...] | None = None
    ) -> None:
        self._devices = sorted(set(devices), key=str)  # as in other processes
        self._generators = [default_generator(device) for device in self._devices]
        self._before = self._states()
        self._but_for = but_for
        self._private: list[PrivateGenerators] = []
        self._heard = 0

    def private(self, j: int, *, grad: bool = False) -> PrivateGenerators:
        """The generators of stage ``j`` in forward; ``grad``: whether it runs with gradients."""
        return self._new(PrivateGenerators(self._seed, j, self._devices, grad=grad))

    def private_in_backward(self, j: int) -> PrivateGenerators:
        """The generators of stage ``j`` in backward."""
        return self._new(PrivateGenerators(self._seed + b"backward", j, self._devices))

    @property
    def drew(self) -> bool:
        """Whether anything was drawn from private generators."""
        return bool(self._heard & _DREW) or any(each.drew for each in self._private)

    @property
    def bits(self) -> int:
        """What other processes must hear: whether anything was drawn, and from which generators."""
        untagged = any(each.untagged for each in self._private)
        return _DREW * self.drew + _MOVED * self.moved() + _UNTAGGED * untagged

    def hear(self, bits: int) -> None:
        """Take the :attr:`bits` of other processes."""
        self._heard |= bits

    @property
    def number(self) -> int:
        """What identifies the states from before the mini-batch, as an integer of 63 bits."""
        return int.from_bytes(self._seed[:8], "little") >> 1

    @property
    def untagged(self) -> list[str]:
        """The names of custom operators that drew from the shared generators themselves."""
        found = sorted(set().union(*(each.untagged for each in self._private)))
        return found or ["one in another process"] * bool(self._heard & _UNTAGGED)

    @cached_property
    def states(self) -> tuple[bytes, ...]:
        """The states from before the mini-batch."""
        return tuple(map(_bytes_of, self._before))

    @cached_property
    def _seed(self) -> bytes:
        return blake2b(b"".join(self.states)).digest()

    def moved(self) -> bool:
        """Whether anything was drawn from the generators themselves."""
        if self._heard & _MOVED:
            return True
        now = tuple(map(_bytes_of, self._states()))
        if now == self.states:
            return False
        older = self._but_for or self.states
        each = zip(now, self.states, older, strict=True)
        return any(state not in (before, other) for state, before, other in each)

    def rewind(self) -> None:
        """Restore the states from before the mini-batch."""
        self._heard &= ~_MOVED
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)

    def advance(self) -> None:
        """Advance the generators by one draw, so that the next mini-batch draws other numbers."""
        for device, generator in zip(self._devices, self._generators, strict=True):
            torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _new(self, private: PrivateGenerators) -> PrivateGenerators:
        self._private.append(private)
        return private


def _bytes_of(state: Tensor) -> bytes:
    return bytes(state.numpy())
