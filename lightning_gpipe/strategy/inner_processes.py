"""Processes between those of the first stage and the last, which run no code of the user's steps.

With outputs for the last stage, that code runs up to its call of the pipeline for the inputs of the
first stage, and from there on for the loss. The processes between need neither. They must know that
the pipeline is called, and for how many rows. So the process of the first stage tells them at its
call; they call the pipeline themselves, with an input of the same shape and without values.

What the code does to layers and to its thread before the call is done in its process alone. So it
must not leave anything there that layers find.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gpipe.core.data import map_tensors, outline, receiving, term_receiver
from lightning_gpipe.core.faithful import Context, Journal, RandomState
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run import ValuesOnLayers

_STEPS = "training_step", "validation_step", "test_step"

Step = Callable[..., Any]


class InnerProcesses:
    """Tells the processes between of the calls in a LightningModule's steps, or is told of them.

    Args:
        module: The LightningModule.
        piped: The pipeline in it.
        places: The places of these processes in the pipeline; none if each process runs the steps.
        changes: Records the steps that are replaced until teardown.

    Attributes:
        some: Whether there are any.
    """

    def __init__(
        self,
        module: L.LightningModule,
        piped: PipedModule,
        places: Collection[int],
        changes: Journal,
    ) -> None:
        self._piped = piped
        self._engine = piped.pipeline.engine
        self.some = bool(places)
        self._told = False  # whether they have been, in this step
        self._call: Mapping[str, Any] | None = None  # of which this process was told
        self._random: RandomState | None = None  # before the step
        self._context: Context | None = None
        layout = self._engine.layout
        inner = [layout.partitions[j] for j in range(layout.n) if layout.owner_of(j) in places]
        self._values = ValuesOnLayers(inner)
        if not places:
            return
        steps = {name: getattr(module, name) for name in _STEPS if is_overridden(name, module)}
        if layout.rank in places:
            changes.write((vars(module), name, self._told_step(x)) for name, x in steps.items())
            return
        changes.write([(vars(piped), "check", self._tell)])
        if layout.first_here:
            changes.write((vars(module), name, self._watched(x)) for name, x in steps.items())

    def begin(self) -> None:
        """Begin a step, in all processes."""
        self._told, self._call, self._context = not self.some, None, None
        if self.some and self._engine.layout.first_here:
            self._random = RandomState.capture()

    def end(self) -> None:
        """End a step; those between are told if it has not called the pipeline."""
        if not self._told:
            self._share(lambda: None)
        self._values.end()

    # In the process of the first stage, and in that of the last, where it is another one.

    def _watched(self, own: Step) -> Step:
        """Return a step that looks at the layers first."""

        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._engine.at_last is not None and not self._told:
                self._context = Context.capture(self._engine.layout.devices_here)
                self._values.begin()
            return own(*args, **kwargs)

        return step

    def _tell(self, piped: PipedModule, program: Program, values: Any) -> None:
        if self._engine.at_last is None or self._told:  # for later micro-batches it is the same
            return

        def call() -> Mapping[str, Any]:
            self._check_left()
            by_micro_batch = self._engine.code is not None  # which draws from generators of its own
            assert self._random is not None, "the step has begun"
            return {
                "input": map_tensors(outline, values[0]),
                "terms": term_receiver.get() is not None,
                "random": [] if by_micro_batch else self._random.changes(),
            }

        self._share(call)

    def _share(self, call: Callable[[], Mapping[str, Any] | None]) -> None:
        self._told = True
        self._call = self._engine.everywhere(0, call)

    def _check_left(self) -> None:
        """Raise if layers of other processes would find something that the step has left."""
        before = self._context
        if before is None:  # the user calls the pipeline in another way
            return
        here = Context.capture(self._engine.layout.devices_here)
        self._values.at_call(0, before.variables, here.variables)
        differences = before.differences() if before.missing() or not before.saves_as_here else []
        found = [*map(repr, self._values.left), *differences]
        if found:
            raise RuntimeError(
                "a step must leave nothing to layers before it calls the pipeline, where only the "
                f"process of the first stage runs it up to there: got another {', '.join(found)}. "
                "Pass values to the layers with their input, leave `with` blocks before the call, "
                "or write outputs='all'."
            )

    # In those between.

    def _told_step(self, own: Step) -> Step:
        """Return a step that does what the process of the first stage tells in place of its own."""

        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._engine.at_last is None:  # all processes run it
                return own(*args, **kwargs)
            if not self._told:
                self._share(lambda: None)
                RandomState.capture().follow(self._call["random"] if self._call else ())
            if self._call is None:
                return None
            if not self._call["terms"]:
                return self._piped.module(self._call["input"])
            with receiving(lambda _: None):
                return self._piped.module(self._call["input"])

        return step
