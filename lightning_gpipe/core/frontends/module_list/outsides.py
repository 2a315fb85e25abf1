"""The tensors from outside that one forward gives to its blocks: the inputs of its program."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.arguments import Reading
from lightning_gpipe.core.frontends.module_list.calls import Call
from lightning_gpipe.core.frontends.module_list.expected import Outside
from lightning_gpipe.core.frontends.module_list.tape import Tape
from lightning_gpipe.core.plan import Step, Value

Read = Callable[[Tensor, Reading | None], Reading | None]


class Outsides:
    """The tensors from outside of one forward.

    Args:
        inputs: The tensors by number, and how they are cut; grows.
        rows: The number of rows of the mini-batch.
        read: How a tensor is cut, given what was learned of another one in its place.

    Attributes:
        accepted: The tensors that are as expected, by the key of that.
        undecided: Those of the call that is compared.
    """

    def __init__(self, inputs: dict[int, tuple[Tensor, Reading]], rows: int, read: Read) -> None:
        self._inputs, self._rows, self._read = inputs, rows, read
        self._tensors: dict[int, Tensor] = {}  # the inputs as they were given
        self._numbers: dict[Hashable, int] = {}
        self.accepted: dict[tuple[int, Reading | None], Tensor] = {}
        self.undecided: list[tuple[Tensor, Outside]] = []

    def is_as(self, tensor: Tensor, expected: Outside) -> bool:
        """Whether a tensor is cut as expected, and the one that earlier calls were given there.

        It is undecided until :meth:`settle` is called.

        Args:
            tensor: The tensor.
            expected: What is expected.
        """
        before = self._tensors.get(expected.source)
        if before is None:
            before = next(
                (x for x, each in self.undecided if each.source == expected.source), tensor
            )
        if before is not tensor or not expected.fits(tensor):
            return False
        if self._read(tensor, expected.learned) != expected.reading:
            return False
        self.undecided.append((tensor, expected))
        return True

    def settle(self, *, accept: bool) -> None:
        """Make the tensors that were as expected inputs, if all that the call is given was."""
        for tensor, expected in self.undecided if accept else ():
            self.accepted[expected.key] = tensor
            self._take(expected.source, tensor, expected.reading)
        self.undecided = []

    def number_as_on(self, tape: Tape) -> None:
        """Go on with the numbers that the tensors have on a tape that was followed."""
        for entry in tape.entries:
            for each in entry.outside:
                key = id(self._tensors[each.source]), each.reading
                self._numbers[key] = each.source
                if each.number != each.source:
                    self._numbers[(*key, entry.call.stage)] = each.number

    def described(
        self, tensor: Tensor, reading: Reading, learned: Reading | None, call: Call, tape: Tape
    ) -> Outside:
        """What stands for a tensor on a tape.

        Args:
            tensor: An argument of a call.
            reading: How it is cut.
            learned: What was learned of that; None if its shape tells.
            call: The call.
            tape: The tape.
        """
        key = id(tensor), reading
        if key not in self._numbers:
            self._numbers[key] = tape.new()
            self._take(self._numbers[key], tensor, reading)
        source = number = self._numbers[key]
        if reading > 1:
            number = self._flattened((*key, call.stage), source, call, tape)
        return Outside(number, source, reading, learned, tensor.dtype, tensor.dim())

    def clear(self) -> None:
        """Forget all tensors."""
        for each in (self._inputs, self._tensors, self._numbers, self.accepted):
            each.clear()

    def _flattened(self, key: Hashable, source: int, call: Call, tape: Tape) -> int:
        """The number of an input with several entries per row, as a stage gets it."""
        if key not in self._numbers:
            self._numbers[key] = number = tape.new()
            given = (Value(source), 0, 1)
            step = Step(torch.flatten, given, number, call.stage, {}, "flatten", call.line)
            tape.steps[number] = step
        return self._numbers[key]

    def _take(self, number: int, tensor: Tensor, reading: Reading) -> None:
        """Make a tensor the input of this number."""
        self._tensors[number] = tensor
        # Several entries per row are given as one, so that all that is cut has the same rows.
        given = tensor.unflatten(0, (self._rows, reading)) if reading > 1 else tensor
        self._inputs[number] = given, reading
