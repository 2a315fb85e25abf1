"""Random numbers that are the same on recomputation and under any timing of threads.

If only one worker uses a generator, as on CUDA, it is enough to save its state before the first
forward and to restore it for the recomputation. On the CPU all threads of a process share one:
workers that draw from it get numbers that depend on timing, and would restore it while others draw.
So each (micro-batch, stage) has a private generator, seeded from the state of the shared one.

# Note [Drawing from private generators]
PyTorch has no default generator per thread, so a dispatch mode passes the private generator to the
operators that draw. `torch.compile` ignores the mode while it compiles; the mode sees the operators
that the compiled code calls. It costs microseconds per operator, and many models draw nothing. So
it is active in the first mini-batch of each training mode, and later only if that one drew. A model
that draws for the first time after that, such as one whose dropout starts at p = 0, changes the
state of the shared generator, which is checked once per mini-batch: then the state is restored, and
the forward runs again with the dispatch mode. Changes of the first run are undone (buffers,
attributes, inputs edited in place), except those outside of the layers.

Draws in backward, as by a hook that adds noise to a gradient, use other private generators in the
same way. A backward cannot run again, so if a model draws there for the first time after a backward
that did not, the numbers are valid but depend on timing, and a warning says so.

The mode sees operators only: not functions in C++, nor custom operators that are not tagged as
drawing. These draw from the shared generator, which is checked afterwards. The shared generator
advances by one draw for a forward or backward that draws, and not at all for others: a model
without dropout gets the same shuffled batches as in a plain run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b

import torch

from lightning_gpipe.core.faithful.managers import NOTHING, Bracket, Manager
from lightning_gpipe.core.faithful.random.private_generators import (
    PrivateGenerators,
    default_generator,
)
from lightning_gpipe.core.faithful.random.random_state import LIBRARIES, RandomState

# Signals: draws from private generators, from the shared ones themselves, by untagged operators.
_DREW, _MOVED, _UNTAGGED = 1, 2, 4


class Randomness:
    """The generators that a stage draws from while it runs one mini-batch.

    They are the default ones of ``devices``, if no other worker uses these, or ``private`` ones.
    With ``libraries`` the states of Python's and NumPy's are saved for recomputation, too.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        private: PrivateGenerators | None = None,
        *,
        libraries: bool = False,
    ) -> None:
        libraries_saved = LIBRARIES if libraries else ()
        self._own = (*map(default_generator, devices), *libraries_saved)
        self._states: dict[int, RandomState] = {}
        self.private = private
        self.in_backward: PrivateGenerators | None = None

    def save(self, i: int) -> None:
        if self._own:
            self._states[i] = RandomState.of(self._own)

    def drawing(self, i: int) -> list[Manager]:
        return [] if self.private is None else [self.private.drawing(i)]

    def drawing_in_backward(self, i: int) -> Manager:
        return NOTHING if self.in_backward is None else self.in_backward.drawing(i)

    def replaying(self, i: int) -> list[Manager]:
        if not self._own:
            return self.drawing(i)
        return [Bracket(self._states.pop(i).exchange, RandomState.restore), *self.drawing(i)]


class SharedGenerators:
    """The generators that several workers share, compared before and after a mini-batch.

    Workers of other processes use generators of their own, in the same state, and signal what they
    drew: it counts like draws in this process. ``but_for`` are older :attr:`states`, which a layer
    with checkpointing of its own may have set.
    """

    def __init__(
        self, devices: Iterable[torch.device], *, but_for: tuple[bytes, ...] | None = None
    ) -> None:
        self._devices = sorted(set(devices), key=str)  # as in other processes
        self._before = RandomState.of([default_generator(device) for device in self._devices])
        self._but_for = but_for
        self._private: list[PrivateGenerators] = []
        self._heard = 0

    def private(self, j: int, *, grad: bool = False, backward: bool = False) -> PrivateGenerators:
        seed = self._seed + b"backward" * backward
        private = PrivateGenerators(seed, j, self._devices, grad=grad)
        self._private.append(private)
        return private

    @property
    def drew(self) -> bool:
        return bool(self._heard & _DREW) or any(private.drew for private in self._private)

    @property
    def bits(self) -> int:
        """A signal to other processes of the kinds of draws."""
        return _DREW * self.drew + _MOVED * self.moved() + _UNTAGGED * bool(self.untagged)

    def hear(self, bits: int) -> None:
        self._heard |= bits

    @property
    def number(self) -> int:
        """A hash of the states from before the mini-batch, of 63 bits."""
        return int.from_bytes(self._seed[:8], "little") >> 1

    @property
    def untagged(self) -> list[str]:
        """The names of custom operators that drew from the shared generators themselves."""
        names = sorted(set().union(*(private.untagged for private in self._private)))
        return names or ["one in another process"] * bool(self._heard & _UNTAGGED)

    @cached_property
    def states(self) -> tuple[bytes, ...]:
        return _bytes_of(self._before)

    @cached_property
    def _seed(self) -> bytes:
        return blake2b(b"".join(self.states)).digest()

    def moved(self) -> bool:
        """Return whether anything was drawn from the generators themselves."""
        if self._heard & _MOVED:
            return True
        now = _bytes_of(RandomState.of(self._before.generators))
        if now == self.states:
            return False
        older = self._but_for or self.states
        states = zip(now, self.states, older, strict=True)
        return any(state not in (before, other) for state, before, other in states)

    def rewind(self) -> None:
        self._heard &= ~_MOVED
        self._before.restore()

    def advance(self) -> None:
        """Advance the generators by one draw, so that the next mini-batch draws other numbers."""
        for device in self._devices:
            default = default_generator(device)
            torch.empty((), dtype=torch.int64, device=device).random_(generator=default)


def _bytes_of(state: RandomState) -> tuple[bytes, ...]:
    return tuple(bytes(tensor.numpy()) for tensor in state.states)
