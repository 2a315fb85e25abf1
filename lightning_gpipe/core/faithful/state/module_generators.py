"""Generators that modules hold, such as a ``torch.Generator`` or NumPy's ``default_rng()``.

Only the worker of the layer's stage draws from them, so it is enough to save their states before
the first forward of each micro-batch. They are searched for in attributes, and in the containers
and tuples there, and again once a module has another object in an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Generator, Tensor, nn

from lightning_gpipe.core.faithful.random.random_state import ForeignGenerator, RandomState
from lightning_gpipe.core.faithful.state.attributes import Owners, Values
from lightning_gpipe.core.layout import is_generator, within

_PLAIN = (int, float, str, bytes, type(None), Tensor)  # without a generator


class ModuleGenerators:
    """The generators that some modules hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._generators: list[Generator | ForeignGenerator] | None = None  # not looked for yet
        self._owners, self._values = Owners(()), Owners(()).values()

    def refresh(self) -> None:
        """Look for them again if a module has another object in an attribute since."""
        if self._generators is None:
            return
        if self._values is not None and not self._owners.moved(self._values):
            return  # most often, and seen at once
        present = self._owners.values()
        if present is None or any(not isinstance(new, _PLAIN) for new in self._new(present)):
            self._generators = None

    def capture(self) -> RandomState | None:
        """Capture their states; None if there are no generators."""
        generators = self._search() if self._generators is None else self._generators
        return RandomState.of(generators) if generators else None

    def _search(self) -> list[Generator | ForeignGenerator]:
        self._owners = Owners(self._modules)
        self._values = self._owners.values()
        by_id = {
            id(each): each
            for holder in self._owners.holders
            for value in holder.held.values()
            for each in within(value)
            if is_generator(each)
        }
        self._generators = [ForeignGenerator.of(each) for each in by_id.values()]
        return self._generators

    def _new(self, present: Values) -> Iterator[Any]:
        before = chain.from_iterable(self._values or ())
        for new, old in zip(chain.from_iterable(present), before, strict=True):
            if new is not old:
                yield new
