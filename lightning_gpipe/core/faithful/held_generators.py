"""Generators that modules hold: their states are saved, so that a recomputation draws the same.

A layer that draws from a ``torch.Generator`` of its own, from NumPy's ``default_rng()`` or from a
``random.Random`` does so on its stage's worker alone, so it is enough to save the state before the
first forward of each micro-batch. Generators are looked for in attributes, and in the containers
and tuples there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_gpipe.core.faithful.journal import Write
from lightning_gpipe.core.plan import holders, is_generator, within


class HeldGenerators:
    """The generators that one stage's modules hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._states: list[_State] | None = None  # None before they were looked for

    def find(self) -> list[_State]:
        """Look for the generators."""
        found = {
            id(each): each
            for holder in holders(self._modules)
            for value in holder.held.values()
            for each in within(value)
            if is_generator(each)
        }
        self._states = [_State(each) for each in found.values()]
        return self._states

    def saved(self) -> list[Write]:
        """The writes that restore the present states."""
        states = self.find() if self._states is None else self._states
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
