"""Generators that modules hold: their states are saved, so that a recomputation draws the same.

A layer that draws from a ``torch.Generator`` of its own, from NumPy's ``default_rng()`` or from a
``random.Random`` does so on its stage's worker alone, so it is enough to save the state before the
first forward of each micro-batch. Generators are looked for in attributes, and in the containers
and tuples there, and again once a module has another object in an attribute.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.faithful.attributes import Owners, Values
from lightning_gpipe.core.faithful.journal import Write
from lightning_gpipe.core.plan import is_generator, within

_PLAIN = (int, float, str, bytes, type(None), Tensor)  # objects that hold no generator


class HeldGenerators:
    """The generators that one stage's modules hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._states: list[_State] | None = None  # None if they must be looked for
        self._owners, self._values = Owners(()), Owners(()).values()

    def find(self) -> list[_State]:
        """Look for the generators."""
        self._owners = Owners(self._modules)
        self._values = self._owners.values()
        found = {
            id(each): each
            for holder in self._owners.holders
            for value in holder.held.values()
            for each in within(value)
            if is_generator(each)
        }
        self._states = [_State(each) for each in found.values()]
        return self._states

    def refresh(self) -> None:
        """Look for them again if a module has another object in an attribute since."""
        if self._states is None:
            return
        if self._values is not None and not self._owners.moved(self._values):
            return  # most often, and seen at once
        present = self._owners.values()
        if present is None or any(not isinstance(new, _PLAIN) for new in self._new(present)):
            self._states = None

    def _new(self, present: Values) -> Iterator[Any]:
        before = chain.from_iterable(self._values or ())
        for new, old in zip(chain.from_iterable(present), before, strict=True):
            if new is not old:
                yield new

    def saved(self) -> list[Write]:
        """The writes that restore the present states."""
        states = self.find() if self._states is None else self._states
        if not states:
            return []
        return [(state, "state", state["state"]) for state in states]

    def __reduce__(self) -> tuple[type[HeldGenerators], tuple[Any]]:
        return HeldGenerators, (self._modules,)  # a copied module has other generators


class _State:
    """The state of a generator, as a slot."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getitem__(self, name: str) -> Any:
        generator = self._generator
        if isinstance(generator, random.Random):
            return generator.getstate()
        if isinstance(generator, torch.Generator) or not hasattr(generator, "bit_generator"):
            return generator.get_state()
        return generator.bit_generator.state

    def __setitem__(self, name: str, state: Any) -> None:
        generator = self._generator
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, torch.Generator) or not hasattr(generator, "bit_generator"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state

    def __delitem__(self, name: str) -> None:
        raise AssertionError("a generator always has a state")
