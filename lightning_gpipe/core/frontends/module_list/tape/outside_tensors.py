"""The tensors from outside among the arguments of one forward's blocks: its program's inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list.tape.arguments import Reading
from lightning_gpipe.core.frontends.module_list.tape.calls import RecordedCall
from lightning_gpipe.core.frontends.module_list.tape.tape import OutsideTensor, Tape
from lightning_gpipe.core.programs import Step, Value

Read = Callable[[Tensor, Reading | None], Reading | None]


class OutsideTensors:
    """The tensors from outside of one forward: ``inputs`` by number, with how they are cut.

    ``read`` returns how a tensor is cut, given the reading learned of another one in its place.
    """

    def __init__(self, inputs: dict[int, tuple[Tensor, Reading]], rows: int, read: Read) -> None:
        self._inputs, self._rows, self._read = inputs, rows, read
        self._tensors: dict[int, Tensor] = {}  # the inputs as the forward has them
        self._numbers: dict[Hashable, int] = {}
        self.accepted: dict[tuple[int, Reading | None], Tensor] = {}
        self.undecided: list[tuple[Tensor, OutsideTensor]] = []

    def is_as(self, tensor: Tensor, expected: OutsideTensor) -> bool:
        """Return whether a tensor is cut as expected, and the same one as in earlier calls.

        It is undecided until :meth:`settle` is called.
        """
        before = self._tensors.get(expected.source)
        if before is None:
            before = next(
                (x for x, other in self.undecided if other.source == expected.source), tensor
            )
        if before is not tensor or not expected.fits(tensor):
            return False
        if self._read(tensor, expected.learned_reading) != expected.reading:
            return False
        self.undecided.append((tensor, expected))
        return True

    def settle(self, *, accept: bool) -> None:
        """Make the undecided tensors inputs if all arguments of the call were as expected."""
        for tensor, expected in self.undecided if accept else ():
            self.accepted[expected.key] = tensor
            self._make_input(expected.source, tensor, expected.reading)
        self.undecided = []

    def number_as_on(self, tape: Tape) -> None:
        """Go on with the numbers that the tensors have on a tape that was followed."""
        for entry in tape.entries:
            for expected in entry.outside:
                key = id(self._tensors[expected.source]), expected.reading
                self._numbers[key] = expected.source
                if expected.number != expected.source:
                    self._numbers[(*key, entry.call.stage)] = expected.number

    def describe(
        self,
        tensor: Tensor,
        reading: Reading,
        learned_reading: Reading | None,
        call: RecordedCall,
        tape: Tape,
    ) -> OutsideTensor:
        key = id(tensor), reading
        if key not in self._numbers:
            self._numbers[key] = tape.new()
            self._make_input(self._numbers[key], tensor, reading)
        source = number = self._numbers[key]
        if reading > 1:  # a stage gets it with several entries per row
            here = *key, call.stage
            if here not in self._numbers:
                self._numbers[here] = number = tape.new()
                args = (Value(source), 0, 1)
                step = Step(torch.flatten, args, number, call.stage, {}, "flatten", call.line)
                tape.steps[number] = step
            number = self._numbers[here]
        return OutsideTensor(number, source, reading, learned_reading, tensor.dtype, tensor.dim())

    def clear(self) -> None:
        for tensors in (self._inputs, self._tensors, self._numbers, self.accepted):
            tensors.clear()

    def _make_input(self, number: int, tensor: Tensor, reading: Reading) -> None:
        self._tensors[number] = tensor
        # Several entries per row become one, so that all that is cut has the same rows.
        value = tensor.unflatten(0, (self._rows, reading)) if reading > 1 else tensor
        self._inputs[number] = value, reading
