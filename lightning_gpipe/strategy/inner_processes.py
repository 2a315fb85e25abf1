"""Processes between those of the first stage and the last, which run no code of the user's steps.

With outputs for the last stage, that code runs up to its call of the pipeline for the inputs of the
first stage, and from there on for the loss. The processes between need neither. So the process of
the first stage tells them at its call which program runs, and for how many rows; they run it on
inputs of the same shapes without values, and that process sends the values that their stages need.

A program is made of the code, unless all calls have the same. So all processes run the code up to
its call where that makes a new program, of which they are told by its number from then on; where it
leaves something to layers, which would be there in its own process only; and where it makes values
for their stages that are larger than its batch. The process of the last stage, which reads batches,
hands them this one, with the parameters that they lack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from lightning_gpipe.core.data import (
    bytes_of,
    is_whole,
    map_tensors,
    outline,
    receiving,
    tensors_of,
    term_receiver,
)
from lightning_gpipe.core.faithful import (
    NOTHING,
    Context,
    Journal,
    Manager,
    RandomState,
    patched,
    record,
    version_of,
)
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import ValuesOnLayers
from lightning_gpipe.core.transport import BY_EARLIER_STEPS, OutOfStep
from lightning_gpipe.distributed import Group, is_without_values

_STEPS = "training_step", "validation_step", "test_step"
_PROGRAMS = 64  # in memory
_BATCH = "a batch for a new program"

Step = Callable[..., Any]
_Mark = tuple[int, bool]  # the version of a tensor, and whether it requires a gradient


class InnerProcesses:
    """Tells the processes between of the calls in a LightningModule's steps, or is told of them.

    Args:
        places: The places of these processes in the pipeline; none if each process runs the steps.
        at_ends: Returns the parameters around the pipeline that those between have on meta.
        have_batches: Whether those between have the values of each batch.
        changes: Records the steps that are replaced until teardown.
    """

    def __init__(
        self,
        module: L.LightningModule,
        piped: PipedModule,
        places: Collection[int],
        group: Group | None,
        at_ends: Callable[[], Sequence[nn.Parameter]],
        changes: Journal,
        *,
        have_batches: bool,
    ) -> None:
        self._module = module
        self._piped = piped
        self._engine = piped.pipeline.engine
        self._layout = layout = self._engine.layout
        self._places, self._group, self._at_ends = places, group, at_ends
        self._have_batches = have_batches
        self.some = bool(places)
        self.lasting = False  # whether all run the code of steps like the latest, up to its call
        # What the code has left to layers, see ValuesOnLayers.numbers; None if it has not run here.
        self.left: dict[str, list[Any]] | None = None
        self.calls: list[int] = []  # checksums of the programs of the step's calls
        self._told = 0  # calls of which the first stage's process has told
        self._programs: dict[int, Program] = {}  # by the numbers of calls for which all made them
        self._call: Mapping[str, Any] | None = None  # the latest one; None if there is none
        self._known = True  # whether this process knows what runs in the present call
        self._begun = False  # whether all run the code, of whose call nothing is known yet
        self._random: RandomState | None = None  # before the step
        self._context: Context | None = None
        self._elsewhere: dict[str, Tensor] = {}  # of layers of other processes
        self._marks: list[_Mark] = []  # of these before the step, and at its call
        self._edits = False  # whether the code edits some of them
        self._given: Any = None  # the arguments of the step
        self._versions: list[tuple[Tensor, int]] = []  # of the tensors in them
        inner = [layout.partitions[j] for j in range(layout.n) if layout.owner_of(j) in places]
        ends = [partition for partition in layout.partitions if partition not in inner]
        self._values, self._values_at_ends = (
            ValuesOnLayers(partitions, piped.frontend.variables) for partitions in (inner, ends)
        )
        steps = {name: getattr(module, name) for name in _STEPS if is_overridden(name, module)}
        around = self._told_step if layout.rank in places else self._watched
        changes.write((vars(module), name, around(x)) for name, x in steps.items())
        changes.write([(vars(piped), "check", self._tell)])

    def begin(self) -> None:
        self._known, self._begun, self.lasting = not self.some, False, False
        self._call, self._context = None, None
        self.left, self.calls = None, []
        if self.some and self._layout.first_here:
            self._random = RandomState.capture()

    def end(self) -> None:
        """End a step; those between are told if it has not called the pipeline."""
        if not self._known:
            self._share(lambda: None)
        # If the code of each micro-batch edits some before its call, nothing tells what came after.
        if self._layout.last_here and (len(self.calls) == 1 or (self.calls and not self._edits)):
            self._refuse_edits()
        self._values.end()
        self._values_at_ends.end()
        self._given, self._versions = None, []

    def _share(self, describe: Callable[[], Mapping[str, Any] | None]) -> None:
        """Let the process of the first stage tell all what runs, and hand them the batch."""
        self._known = True
        self._told += 1
        self._call = call = self._engine.everywhere(0, describe)
        if call is None:
            return
        self.lasting = self.lasting or call["lasting"]
        self._known = call["known"]
        if call["hands"] and self._layout.last_here:
            self._hand()
        elif call["hands"] and self._layout.rank in self._places:
            assert self._group is not None, "several processes are connected"
            self._given = self._group.take(_BATCH)

    @property
    def _repeats(self) -> bool:
        """True if the code runs for another micro-batch, with nothing new to tell."""
        call = self._call
        return self._known and (call is None or (not call["runs"] and call["number"] == 0))

    def compare(self, left: Mapping[str, Any] | None, calls: Sequence[int]) -> None:
        """Raise OutOfStep if the last stage's process has other values or calls than this one."""
        for i, (own, other) in enumerate(zip(self.calls, calls, strict=False)):
            if own != other:
                raise OutOfStep(
                    "a step must make the same calls of layers in all processes that run it: got "
                    f"others, or other numbers in these, for micro-batch {i} than in the process "
                    f"of the last stage.{BY_EARLIER_STEPS}"
                )
        if left is None or self.left is None:
            return
        for name in {**left, **self.left}:
            here, there = self.left.get(name), left.get(name)
            if repr(here) != repr(there):  # as that of no number is
                raise OutOfStep(
                    "a step must leave the same values to layers in all processes that run it: got "
                    f"{here} for {name} where it is {there} in the process of the last stage."
                    f"{BY_EARLIER_STEPS}"
                )

    # In the process of the first stage, and in that of the last, where it is another one.

    def _watched(self, own: Step) -> Step:
        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._engine.at_last is not None:  # not in a verification
                self._look()
            if self._engine.at_last is not None and not self._repeats:
                self._engine.at_last.before_answer = self._run_in_all
                self._known = self._begun = False
                self._versions = []
                # Its containers are others, which the code does not change.
                self._given = map_tensors(self._noted, (args, kwargs))
            return own(*args, **kwargs)

        return step

    def _look(self) -> None:
        if self._context is None:
            self._context = Context.capture(self._layout.devices_here)
            self._values.begin()
            self._values_at_ends.begin()
            self._elsewhere = self._elsewhere or dict(self._tensors_elsewhere())
            self._marks = self._marks_now()

    def _tensors_elsewhere(self) -> Iterator[tuple[str, Tensor]]:
        for j, partition in enumerate(self._layout.partitions):
            for title, layer in partition.titled_layers:
                if j not in self._layout.stages_here:
                    tensors = layer.named_parameters(), layer.named_buffers()
                    yield from (
                        (f"{name} of {title}", x) for name, x in chain(*tensors) if x.is_meta
                    )

    def _marks_now(self) -> list[_Mark]:
        with DisableTorchFunctionSubclass():  # they have no values that these would read
            return [(version_of(x), x.requires_grad) for x in self._elsewhere.values()]

    def _refuse_edits(self) -> None:
        """Refuse edits that the code has made after its call, in this process alone."""
        now = zip(self._elsewhere, self._marks_now(), strict=True)
        edited = (name for (name, one), other in zip(now, self._marks, strict=True) if one != other)
        if (name := next(edited, None)) is not None:
            raise RuntimeError(
                "a step must not edit parameters or buffers of layers after its call of the "
                "pipeline, where it goes on in the process of the last stage only: got an edit of "
                f"{name}. Edit them before the call or in on_train_batch_end, or write "
                "outputs='all'."
            )

    def _noted(self, tensor: Tensor) -> Tensor:
        self._versions.append((tensor, -1 if tensor.is_inference() else tensor._version))
        return tensor

    def _run_in_all(self) -> None:
        """Let all processes run the code: they are going to compute something together for it."""
        if not (self._known or self._begun):
            self._share(lambda: {"runs": True, "lasting": False, "hands": True, "known": False})
            self._begun = True

    def _tell(
        self, piped: PipedModule, program: Program, values: Sequence[Any], chunks: int | None
    ) -> None:
        step = self._engine.at_last
        if step is None:
            return
        self.calls.append(program.checksum)
        if not self._known:
            self._share(partial(self._describe, program, values, chunks))
        if self.left is None:  # in the process of the first stage it is known by now
            self._leaves_something()
        call = self._call
        if call is None:  # there are no processes between
            return
        step.told = not call["runs"]
        if call["runs"] and not call["lasting"]:
            record(self._programs, self._told, program, _PROGRAMS)

    def _describe(
        self, program: Program, values: Sequence[Any], chunks: int | None
    ) -> Mapping[str, Any]:
        number = next((k for k, known in self._numbered() if known is program), None)
        lasting = self._leaves_something() or self._is_large(program, values, chunks)
        runs = self._begun or lasting or number is None
        call = {"runs": runs, "lasting": lasting, "hands": runs and not self._begun, "known": True}
        if runs:
            return call
        by_micro_batch = self._engine.code is not None  # which draws from generators of its own
        assert self._random is not None, "the step has begun"
        return {
            **call,
            "number": number,
            "values": map_tensors(outline, list(values)),
            "chunks": chunks,
            "terms": term_receiver.get() is not None,
            "random": [] if by_micro_batch else self._random.changes(),
        }

    def _numbered(self) -> Iterator[tuple[int, Program]]:
        if (always := self._piped.frontend.program) is not None:
            yield 0, always
        yield from self._programs.items()

    def _leaves_something(self) -> bool:
        """Return True if layers of other processes would find something that the code has left."""
        before = self._context
        if before is None:  # the user calls the pipeline in another way
            return False
        here = Context.capture(self._layout.devices_here)
        for values in (self._values, self._values_at_ends):
            values.at_call(0, before.variables, here.variables)
        self.left = self.left or {**self._values.numbers, **self._values_at_ends.numbers}
        marks = self._marks_now()
        self._edits |= marks != self._marks
        self._marks = marks
        same = before.saves_as_here and not before.missing()
        return bool(self._values.left) or self._edits or not same

    def _is_large(self, program: Program, values: Sequence[Any], chunks: int | None) -> bool:
        """Return True if one of these processes would get more bytes than its batch has."""
        m = 1 if self._engine.code is not None else chunks or self._piped.pipeline.chunks
        value_of = dict(zip(program.inputs, values, strict=True))
        sent: dict[int, int] = {}
        for route in program.given:
            owner = self._layout.owner_of(route.target)
            if owner in self._places:
                tensors = [value_of[number] for number in route.numbers]
                size = sum(bytes_of(x) * (m if is_whole(x) else 1) for x in tensors_of(tensors))
                sent[owner] = sent.get(owner, 0) + size
        return max(sent.values(), default=0) > sum(bytes_of(x) for x, _ in self._versions)

    def _hand(self) -> None:
        """Hand the batch to those between, if they lack it, and parameters that they lack."""
        if any(not x.is_inference() and x._version != before for x, before in self._versions):
            raise RuntimeError(
                "a step must not edit its batch in place before its call of the pipeline, where "
                "other processes run it up to there after the first one: got an edited tensor. "
                "Edit a copy, or write outputs='all'."
            )
        assert self._group is not None, "several processes are connected"
        lent = [parameter.detach() for parameter in self._at_ends()]
        given = ((), {}) if self._have_batches else self._given
        self._group.hand((*given, lent), self._places, _BATCH)

    # In those between.

    def _told_step(self, own: Step) -> Step:
        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._engine.at_last is None:  # all processes run it
                return own(*args, **kwargs)
            if not self._repeats:
                self._share(lambda: None)
                self._begun = self._call is not None and not self._known
            call = self._call
            if call is None:
                return None
            if call["runs"]:
                given, named, lent = self._given
                if is_without_values((args, kwargs)):
                    args, kwargs = move_data_to_device((given, named), self._layout.outside)
                with self._borrowed(lent):
                    self._look()
                    return own(*args, **kwargs)
            RandomState.capture().follow(call["random"])
            program = dict(self._numbered())[call["number"]]
            with receiving(lambda _: None) if call["terms"] else NOTHING:
                self._piped.run_told(program, call["values"], chunks=call["chunks"])
            return None

        return step

    def _borrowed(self, lent: Sequence[Tensor]) -> Manager:
        """A ``with`` block in which modules have the values of parameters that others have."""
        outside = self._layout.outside
        pairs = zip(self._at_ends(), lent, strict=True)
        own = {id(p): nn.Parameter(x.to(outside), p.requires_grad) for p, x in pairs}
        slots = [
            (module._parameters, name, own[id(parameter)])
            for module in (self._module.modules() if own else ())
            for name, parameter in module._parameters.items()
            if id(parameter) in own
        ]
        return patched(slots)
