"""What hooks within blocks collect for the model: router logits, attentions, hidden states.

The models of transformers register such hooks, and put a dict of lists into a context variable
around their forward; a hook appends to the list of its key. In a stage it would append what it gets
of one micro-batch, from the stage's own graph. So each block runs with lists of its own, and what
is in them afterwards is returned with what the block returns. The model's own lists get
placeholders.

The variable is looked up where transformers was imported, which this package does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

Lists = dict[str, list[Any]]
_STATES = "hidden_states"  # the list whose first value is of another kind


class Collector:
    """The dict into which the hooks of the running forward collect.

    Args:
        outer: The dict.
        variable: The context variable that has it.
    """

    def __init__(self, outer: dict[str, Any], variable: Any) -> None:
        self._outer, self._variable = outer, variable

    @classmethod
    def active(cls) -> Collector | None:
        """That of the calling thread, if something is to be collected."""
        module = sys.modules.get("transformers.utils.output_capturing")
        variable = getattr(module, "_active_collector", None)
        outer = None if variable is None else variable.get()
        return cls(outer, variable) if outer else None

    @property
    def kind(self) -> Hashable:
        """Equal if hooks append as many values to each list."""
        # The first hidden state is collected with the input of its block; which others are, may
        # be given by their indices.
        counts = {key: len(each) for key, each in self._outer.items() if isinstance(each, list)}
        chosen = len(counts) < len(self._outer)
        states = counts.get(_STATES, 0)
        return tuple(counts), states if chosen else states > 0

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns what ``run`` does, and what was collected in it."""
        return _Collecting(run, self._variable, self._outer)

    def give(self, collected: Lists) -> None:
        """Append to the lists of the model."""
        for key, values in collected.items():
            self._outer[key] += values


class _Collecting:
    """Runs a block with lists of its own, as long as those of the model were before it."""

    def __init__(self, run: Callable[..., Any], variable: Any, outer: dict[str, Any]) -> None:
        self._run, self._variable = run, variable
        self._lengths = {key: len(each) for key, each in outer.items() if isinstance(each, list)}
        self._others = {key: each for key, each in outer.items() if not isinstance(each, list)}

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Lists]:
        mine = {key: [None] * length for key, length in self._lengths.items()}
        token = self._variable.set({**self._others, **mine})
        try:
            result = self._run(*args, **kwargs)
        finally:
            self._variable.reset(token)
        return result, {key: mine[key][length:] for key, length in self._lengths.items()}
