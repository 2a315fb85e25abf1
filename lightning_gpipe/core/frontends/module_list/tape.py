"""What one forward did with its blocks, without its tensors.

Most often the next forward does the same. So it follows the tape of an earlier one: as long as its
calls are given the same, nothing need be found out about them, and its program is there already.
With the first call that differs it goes on by itself, from a copy of what it has followed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_gpipe.core.frontends.module_list.arguments import leaves_in
from lightning_gpipe.core.frontends.module_list.calls import Call, Learned
from lightning_gpipe.core.frontends.module_list.expected import Outside
from lightning_gpipe.core.frontends.module_list.pattern import Pattern, pattern_of
from lightning_gpipe.core.plan import Program, Step

_PROGRAMS = 8  # that are kept of a tape: one for each choice of values that the forward keeps


@dataclass(frozen=True)
class Entry:
    """One recorded call.

    Attributes:
        call: The call.
        given: Its arguments: a Value for a placeholder, an :class:`Outside`, or a constant.
        learned: What is known of it.
        numbers: The number of the value of each leaf that it returns.
        count: How many values there were after it.
    """

    call: Call
    given: Any
    learned: Learned
    numbers: Sequence[int]
    count: int

    @cached_property
    def patterns(self) -> tuple[Pattern, Pattern]:
        """Whether the args of another call are the same, and its kwargs."""
        args, kwargs = self.given
        return pattern_of(args), pattern_of(kwargs)

    @property
    def outside(self) -> Iterator[Outside]:
        """The tensors from outside in its arguments."""
        return (leaf for _, leaf in leaves_in(self.given) if type(leaf) is Outside)


class Tape:
    """The recorded calls of a forward, in order.

    Attributes:
        entries: The calls.
        steps: Their steps, and those that prepare their arguments, by the numbers of the results.
        calls: Of steps that are calls, what is known.
        picked: The call and the leaf of each value that is a leaf of what a call returned.
        programs: Programs of all of it, by what they return.
        count: The number of values.
        closed: Whether a program was made of it: it does not change any more.
        reusable: Whether another forward may follow it.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.steps: dict[int, Step] = {}
        self.calls: dict[int, tuple[Call, Learned]] = {}
        self.picked: dict[int, tuple[int, int]] = {}
        self.programs: dict[Hashable, Program] = {}
        self.count = 0
        self.closed = False
        self.reusable = True

    def new(self) -> int:
        """The number of a new value."""
        self.count += 1
        return self.count - 1

    def until(self, k: int) -> Tape:
        """An open tape with the first k calls."""
        made = Tape()
        made.entries = self.entries[:k]
        made.count = count = made.entries[-1].count if k else 0
        made.steps = {number: x for number, x in self.steps.items() if number < count}
        made.calls = {number: x for number, x in self.calls.items() if number < count}
        made.picked = {number: x for number, x in self.picked.items() if number < count}
        return made

    def keep(self, key: Hashable, program: Program) -> None:
        """Keep a program, and close the tape."""
        self.closed = True
        if len(self.programs) >= _PROGRAMS:
            self.programs.clear()
        self.programs[key] = program
