"""The states of random generators as one value, to restore and to compare.

They are PyTorch's default ones, those of Python's ``random`` and ``numpy.random``, which a process
has once, and those that modules hold. Python's and NumPy's cannot be replaced by private ones: they
are restored for a recomputation if all stages run on the caller's thread. On threads the stages
draw in an order that the operating system decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy.random
import torch
from torch import Generator, Tensor

from lightning_gpipe.core.faithful.journal import ValueSlot, Write
from lightning_gpipe.core.faithful.random.private_generators import default_generator


class ForeignGenerator(NamedTuple):
    """A generator of Python or NumPy, with the methods of PyTorch's."""

    name: str
    get_state: Callable[[], Any]
    set_state: Callable[[Any], None]

    @classmethod
    def of(cls, generator: Any) -> ForeignGenerator | Generator:
        if isinstance(generator, random.Random):
            return cls("random.Random", generator.getstate, generator.setstate)
        if not hasattr(generator, "bit_generator"):
            return generator  # a torch.Generator or a numpy.random.RandomState
        bits = generator.bit_generator
        read, write = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        return cls("numpy.random.Generator", read, write)


LIBRARIES = (
    ForeignGenerator("random", random.getstate, random.setstate),
    ForeignGenerator("numpy.random", numpy.random.get_state, numpy.random.set_state),
)


class RandomState(NamedTuple):
    """The states of some generators at one time."""

    generators: Sequence[Generator | ForeignGenerator]
    states: Sequence[Any]

    @classmethod
    def of(cls, generators: Sequence[Generator | ForeignGenerator]) -> RandomState:
        return cls(generators, [generator.get_state() for generator in generators])

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> RandomState:
        """Capture the states of the CPU's generator, those of ``devices``, Python's and NumPy's."""
        default = map(default_generator, (torch.device("cpu"), *devices))
        return cls.of([*dict.fromkeys(default), *LIBRARIES])

    def restore(self) -> None:
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)

    def changes(self) -> list[tuple[int, Any]]:
        """Return the numbers and the present states of the generators that have others since."""
        present = RandomState.of(self.generators).states
        states = enumerate(zip(self.states, present, strict=True))
        return [(k, new) for k, (old, new) in states if not _same(old, new)]

    def follow(self, changes: Iterable[tuple[int, Any]]) -> None:
        """Set generators to the states that another process has found by :meth:`changes`."""
        for k, state in changes:
            self.generators[k].set_state(state)

    def differences(self) -> list[str]:
        """Return the names of the generators that were drawn from, or set, since."""
        present = RandomState.of(self.generators).states
        return [
            generator.name if isinstance(generator, ForeignGenerator) else str(generator.device)
            for generator, old, new in zip(self.generators, self.states, present, strict=True)
            if not _same(old, new)
        ]

    def exchange(self) -> RandomState:
        """Set the generators to these states, and return those before."""
        before = RandomState.of(self.generators)
        self.restore()
        return before

    def writes(self) -> list[Write]:
        return [
            (ValueSlot(generator.get_state, generator.set_state), "state", state)
            for generator, state in zip(self.generators, self.states, strict=True)
        ]


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):
        return torch.equal(old, new)
    if isinstance(old, dict | str):
        return repr(old) == repr(new)
    if isinstance(old[1], tuple):
        return bool(old == new)
    return bool(old[2:] == new[2:] and (old[1] == new[1]).all())
