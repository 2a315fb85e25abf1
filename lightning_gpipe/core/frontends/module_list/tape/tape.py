"""One forward's calls of its blocks, without tensors.

Each forward follows the tape of an earlier one, and need not learn anything, as long as its calls
have the same arguments. From the first that differs it goes on with a copy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.tape.arguments import (
    Arguments,
    Reading,
    is_named,
    leaves_in,
)
from lightning_gpipe.core.frontends.module_list.tape.calls import (
    Knowledge,
    RecordedCall,
    Result,
    TensorLeaf,
    checked_result,
)
from lightning_gpipe.core.frontends.module_list.tape.placeholder import Placeholder
from lightning_gpipe.core.programs import Program, Step, Value


@dataclass(frozen=True)
class OutsideTensor:
    """Stands for a tensor from outside in the arguments of a recorded call."""

    number: int  # of the value that the step gets
    source: int  # the number of the input: another one if the stage must reshape it
    reading: Reading
    learned_reading: Reading | None  # None if the shape tells
    dtype: torch.dtype
    dims: int

    @cached_property
    def key(self) -> tuple[int, Reading | None]:
        """A key that is equal for those that accept the same tensors."""
        return self.source, self.learned_reading

    def fits(self, tensor: Tensor) -> bool:
        return tensor.dtype is self.dtype and tensor.dim() == self.dims


@dataclass(frozen=True)
class TapeEntry:
    """One recorded call; its arguments have Values for placeholders, OutsideTensors for tensors."""

    call: RecordedCall
    number: int  # of the value that it returns
    arguments: Any
    knowledge: Knowledge
    numbers: Sequence[int]  # of the values of the leaves that it returns
    count: int  # of values on the tape after it

    @property
    def outside(self) -> Iterator[OutsideTensor]:
        return (leaf for _, leaf in leaves_in(self.arguments) if type(leaf) is OutsideTensor)


class Tape:
    """The recorded calls of a forward, in order.

    ``steps`` has those of calls, and those that prepare their arguments, by the results' numbers,
    ``calls`` the call that returns a value. With one of ``programs``, it changes no more.
    ``reusable`` says whether another forward may follow it, which has at most so many ``rows``.
    """

    def __init__(self) -> None:
        self.entries: list[TapeEntry] = []
        self.steps: dict[int, Step] = {}
        self.calls: dict[int, TapeEntry] = {}
        self.programs: dict[Hashable, Program] = {}
        self.count = 0
        self.reusable = True
        self.rows = math.inf

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def add(
        self, call: RecordedCall, arguments: Arguments, leaves: Sequence[Any], knowledge: Knowledge
    ) -> int:
        values = (Value(leaf.number) if type(leaf) is OutsideTensor else leaf for leaf in leaves)
        args, kwargs = arguments.with_leaves(values)
        number, objects = self.new(), arguments.objects
        check = partial(checked_result, call.name, knowledge.result, objects)
        self.steps[number] = Step(
            call.run, args, number, call.stage, kwargs, call.name, call.line, check
        )
        numbers = self._pick(number, call, knowledge.result)
        on_tape = arguments.with_leaves(leaves)
        entry = TapeEntry(call, number, on_tape, knowledge, numbers, self.count)
        self.entries.append(entry)
        self.rows = min(self.rows, knowledge.rows)
        self.calls |= dict.fromkeys([number, *numbers], entry)
        if objects:  # which live as long as their forward, and are others in the next
            self.reusable = False
        return number

    def _pick(self, source: int, call: RecordedCall, result: Result) -> list[int]:
        numbers = []
        for k, leaf in enumerate(result.leaves):
            number = source
            if isinstance(leaf, TensorLeaf) and not result.single:
                number, name = self.new(), f"{call.name}[{k}]"
                args = (Value(source),)
                self.steps[number] = Step(
                    itemgetter(k), args, number, call.stage, {}, name, call.line
                )
            numbers.append(number)
        return numbers

    def until(self, k: int) -> Tape:
        tape = Tape()
        tape.entries = self.entries[:k]
        tape.rows = self.rows
        tape.count = count = tape.entries[-1].count if k else 0
        tape.steps = {number: step for number, step in self.steps.items() if number < count}
        tape.calls = {number: call for number, call in self.calls.items() if number < count}
        return tape


@dataclass
class History:
    """The knowledge and the tapes of earlier forwards, by the kind of the first call."""

    knowledge: dict[Hashable, Knowledge] = field(default_factory=dict)
    tapes: dict[Hashable, Tape] = field(default_factory=dict)


def same_arguments(expected: Any, tree: Any, recording: Any) -> bool:
    """Return whether the arguments of a call are those of a recorded one."""
    kind = type(expected)
    if kind is Value:
        return (
            type(tree) is Placeholder
            and tree.number == expected.number
            and tree.recording is recording
        )
    if kind is OutsideTensor:
        if not isinstance(tree, Tensor) or type(tree) is Placeholder:
            return False
        # Most often all blocks get the same ones.
        outsides = recording.outsides
        return outsides.accepted.get(expected.key) is tree or outsides.is_as(tree, expected)
    if kind is dict:
        if type(tree) is not dict or tuple(tree) != tuple(expected):
            return False
        items, others = expected.values(), tree.values()
    elif kind is tuple or kind is list or is_named(expected):
        if type(tree) is not kind or len(tree) != len(expected):
            return False
        items, others = expected, tree
    else:
        plain = type(tree) is kind and is_plain(expected) and is_plain(tree)
        return plain and bool(expected == tree)
    for item, other in zip(items, others, strict=True):
        if item is not other and not same_arguments(item, other, recording):
            return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether two equal constants of this type mean the same."""
    if type(value) is slice:
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return type(value) in _PLAIN


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
