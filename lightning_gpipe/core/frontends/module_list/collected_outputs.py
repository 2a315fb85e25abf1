"""Outputs that hooks within blocks collect for the model: router logits, attentions, hidden states.

Hooks of transformers append to a dict of lists in a context variable. In a stage they would append
the values of one micro-batch, from the stage's own graph. So each block runs with lists of its own
and returns them with its result; the model's lists get placeholders. The variable is looked up
where transformers was imported, which this package does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

from lightning_gpipe.core.faithful import setting

Lists = dict[str, list[Any]]
_STATES = "hidden_states"  # the list whose first value is of another kind


class Collector:
    """The dict into which the hooks of the running forward collect, in a context variable."""

    def __init__(self, outer: dict[str, Any], variable: Any) -> None:
        self._outer, self._variable = outer, variable
        self._lengths = {key: len(x) for key, x in outer.items() if isinstance(x, list)}

    @classmethod
    def active(cls) -> Collector | None:
        module = sys.modules.get("transformers.utils.output_capturing")
        variable = getattr(module, "_active_collector", None)
        outer = None if variable is None else variable.get()
        return cls(outer, variable) if outer else None

    @property
    def kind(self) -> Hashable:
        """A key that is equal if hooks append as many values to each list."""
        # The first hidden state is collected with the input of its block; which others are may
        # depend on their indices.
        lengths = self._lengths
        chosen = len(lengths) < len(self._outer)
        states = lengths.get(_STATES, 0)
        return tuple(lengths), states if chosen else states > 0

    def around(self, run: Callable[..., Any]) -> Callable[..., tuple[Any, Lists]]:
        """Return a function that returns the result of ``run``, and what hooks collected in it."""
        variable, lengths = self._variable, self._lengths
        others = {key: x for key, x in self._outer.items() if key not in lengths}

        def collecting(*args: Any, **kwargs: Any) -> tuple[Any, Lists]:
            # Hooks look at the lengths: those of the model's lists before the block.
            own: Lists = {key: [None] * length for key, length in lengths.items()}
            with setting(variable.get, variable.set, {**others, **own}):
                result = run(*args, **kwargs)
            return result, {key: own[key][length:] for key, length in lengths.items()}

        return collecting

    def give(self, collected: Lists) -> None:
        for key, values in collected.items():
            self._outer[key] += values
