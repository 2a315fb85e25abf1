"""The caller's code for the micro-batches of one mini-batch, and its graphs.

For each micro-batch it runs up to its call of the pipeline, then from there to the loss. Each part
is followed, sooner or later, by its backward::

    P   its code up to the call         -->  inputs of the pipeline
    L   outputs  -->  its code to the loss, and backward from the loss to the outputs
    B   gradients of the inputs         -->  backward through the graph of P

If the loss does not depend on P but through the pipeline, as where a head follows the pipeline and
an embedding comes before, backward from the loss frees its graph. With a residual connection around
the pipeline, B needs a part of it again.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, Term, map_tensors
from lightning_gpipe.core.faithful import (
    LIBRARIES,
    NOTHING,
    Context,
    Manager,
    RandomState,
    ThreadState,
    add_note,
    together,
)
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.autograd_node import StepOutputs
from lightning_gpipe.core.run.backward.roots import (
    Root,
    any_saved_before,
    graph_behind,
    now,
    root_of,
    roots_of,
)
from lightning_gpipe.core.run.backward.sums import Gradients
from lightning_gpipe.core.run.guards.lost_gradients import refuse_second_backward
from lightning_gpipe.core.run.guards.values_on_layers import ValuesOnLayers
from lightning_gpipe.core.run.micro_batch_losses.coroutine import Coroutine
from lightning_gpipe.core.run.micro_batch_losses.losses import Losses
from lightning_gpipe.core.run.micro_batch_losses.outside_gradients import OutsideGradients
from lightning_gpipe.core.transport import Exchange

Function = Callable[[int], Any]  # runs the caller's code for a micro-batch, and returns its result

_THROUGH_PIPELINE = (
    "torch.autograd.grad and backward in training_step must not go through the pipeline, with a "
    "loss for each micro-batch: got a tensor that the differentiated one does not depend on, or "
    "only through the pipeline. For a gradient penalty or a Jacobian, run the layers one by one: "
    "for layer in self.layers: x = layer(x)."
)
_DRAWN_TWICE = (
    "a step must draw from Python's and NumPy's generators before its call of the pipeline or "
    "after it, if only the last stage gets the output of each micro-batch: got draws from {} on "
    "both sides. Other processes run it up to the call only, for one micro-batch after another, "
    "and would draw other numbers. Use torch.rand on one side, or write outputs='all'."
)

Presented = tuple[FlatTree, list[Term]]  # the outputs of a call, and the loss terms of its layers


class Call(NamedTuple):
    """A call of the pipeline by the caller's code, whose stages run in its context variables."""

    inputs: FlatTree
    program: Program
    terms: bool
    variables: contextvars.Context
    told: bool

    def alike(self, other: Call) -> bool:
        return (self.program, self.terms) == (other.program, other.terms)


class _GraphBefore(NamedTuple):
    """The graph that the code made before its call, and the time before it."""

    roots: list[Root | None]
    leaves: list[Tensor]
    nodes: frozenset[Any]
    since: int


class UserStep:
    """The caller's code for one mini-batch.

    Attributes:
        results: Its result for each micro-batch, detached.
        drawing: Makes the context manager in which it draws random numbers for a micro-batch.
        ends_elsewhere: Whether other processes run it up to its calls only.
        watched: Makes context managers around it, which record its draws.
        running: The micro-batch for which it runs now; None while it is suspended.
        undisturbed: A ``with`` block in which no worker uses the modules.
        answers: Numbers what processes compute together in the exchange.
    """

    def __init__(
        self,
        function: Function,
        m: int,
        losses: Losses,
        context: Context,
        outside: OutsideGradients,
        values: ValuesOnLayers,
    ) -> None:
        self.m = m
        self.losses = losses
        self.results: list[Any] = [None] * m
        self._function = function
        self._context = context
        self._backward_context = context.without_autocast()  # which is for forwards
        self._outside = outside
        self._values = values
        self.drawing: Callable[[int], Manager] | None = None
        self.watched: Callable[[], list[Manager]] = list
        self.ends_elsewhere = False
        self._drawn: tuple[set[str], set[str]] = set(), set()  # from where, before and after calls
        self._managers: dict[int, Manager] = {}
        self._coroutines: dict[int, Coroutine] = {}
        self._called: set[int] = set()
        self.running: int | None = None
        self.undisturbed: Manager = NOTHING
        self.exchange: Exchange | None = None
        self.answers = count()
        self.trained: Sequence[Tensor] = ()
        self._state = ThreadState.capture()
        self._before: dict[int, _GraphBefore] = {}

    def is_current(self) -> bool:
        i = self.running
        return i is not None and self._coroutines[i].current

    def call(
        self, inputs: FlatTree, program: Program, *, terms: bool = False, told: bool = False
    ) -> Presented:
        """Call the pipeline from this code; return outputs and loss terms in the caller's graph.

        A sum is scaled up by as much as the weight of this loss will scale it down.
        """
        i = self.running
        assert i is not None, "the code runs"
        if i in self._called:
            raise RuntimeError(
                "training_step must call the pipeline once, with a loss for each micro-batch: got "
                "a second call. Put both inputs into one batch, or write schedule='fill_drain'."
            )
        self._check_state()
        self._called.add(i)
        call = Call(inputs, program, terms, contextvars.copy_context(), told)
        presented: Presented = self._coroutines[i].suspend(call)
        outputs, handed_out = presented
        return outputs, [self.losses.weighted(i, term) for term in handed_out]

    def prepare(self, i: int) -> Call | None:
        """Run it for micro-batch ``i`` up to its call; None if it returned without one."""
        since = now()
        if not i:
            self._values.begin()
        variables = self._context.variables
        coroutine = self._coroutines[i] = Coroutine(partial(self._function, i), variables.copy())
        call = self._resume(i)
        if coroutine.ended:
            self.results[i] = self._end(i, call)
            return None
        assert isinstance(call, Call), "it was suspended by its call"
        roots = roots_of(call.inputs.leaves)
        kept = self._values.at_call(i, variables, call.variables)  # which stages use, too
        leaves, nodes = graph_behind([*roots, *map(root_of, kept)])
        self._before[i] = _GraphBefore(roots, leaves, frozenset(nodes), since)
        return call

    def finish(
        self, i: int, outputs: FlatTree, presented: Callable[[FlatTree], Presented]
    ) -> Gradients:
        """Run it for micro-batch ``i`` from the outputs to its loss, and the loss's backward.

        ``presented`` converts the outputs, in the code's graph, to the result of its call. Return
        the gradients of the leaves of the outputs; none if there are none.
        """
        before = self._before[i]
        sources = () if i else (*before.leaves, *self.trained)  # the code is the same for all
        step_outputs = StepOutputs(outputs, sources, _THROUGH_PIPELINE)
        try:
            result = self._resume(i, presented(step_outputs.outputs))
        except RuntimeError as error:
            _refuse_gradient_through_pipeline(error)
            raise
        if self.m > 1:
            self._values.at_end(i)
        step_outputs.allow_backward()
        loss_and_seed = self.losses.add(i, result)
        self.results[i] = self._end(i, result)
        del result
        if loss_and_seed is None:
            return []
        loss, seed = loss_and_seed

        def keep(nodes: set[Any]) -> bool:
            shared = not before.nodes.isdisjoint(nodes)
            return shared or any_saved_before(nodes, before.since)

        self._run_backward(i, [root_of(loss)], [seed], end=step_outputs.end, keep=keep)
        return step_outputs.take_gradients()

    def leave(self, i: int) -> None:
        """End it for micro-batch ``i`` at its call, whose output another process gets."""
        with together([self._context.entered(), *self._own(i)]):
            self._coroutines[i].close()

    def skip(self, i: int) -> None:
        if self.results[i] is not None:
            raise RuntimeError(
                "training_step must call the pipeline once for each micro-batch: got a result for "
                f"micro-batch {i} without a call. A step that returns None skips the batch; "
                "schedule='fill_drain' allows any."
            )

    def go_back(self, i: int, gradients: Gradients) -> None:
        """Run backward from the inputs of the call for micro-batch ``i``, if any has a gradient."""
        before = self._before.pop(i)
        if gradients and before.roots:
            self._run_backward(i, before.roots, gradients)

    def leaves_before_calls(self) -> Iterator[Tensor]:
        """Yield the leaves that will get gradients from the code before its calls."""
        for before in self._before.values():
            yield from before.leaves

    def close(self, error: BaseException) -> None:
        """End suspended code; errors of its ``finally`` blocks become notes of ``error``."""
        for coroutine in self._coroutines.values():
            try:
                coroutine.close()
            except BaseException as raised:
                add_note(error, f"while training_step was ended: {type(raised).__name__}: {raised}")
        self._before.clear()  # the user may keep the error, and with it this

    def _resume(self, i: int, value: Any = None) -> Any:
        watched, called = self.watched(), i in self._called
        libraries = RandomState.of(LIBRARIES) if watched and self.ends_elsewhere else None
        with together([*watched, self._context.entered(), *self._own(i)]):
            self._state = ThreadState.capture()
            self.running = i
            try:
                result = self._coroutines[i].resume(value)
            finally:
                self.running = None
        if libraries is not None:
            self._drawn[called].update(libraries.differences())
            if both := sorted(set.intersection(*self._drawn)):
                raise RuntimeError(_DRAWN_TWICE.format(" and ".join(both)))
        return result

    def _end(self, i: int, result: Any) -> Any:
        assert self._coroutines[i].ended, "a second call raises in the code"
        return map_tensors(Tensor.detach, result)

    def _run_backward(
        self, i: int, roots: Sequence[Root | None], gradients: Gradients, **options: Any
    ) -> None:
        with together([self._backward_context.entered(), *self._own(i)]):
            try:
                self._outside.backward(roots, gradients, **options)
            except RuntimeError as error:
                refuse_second_backward(error)
                raise

    def _own(self, i: int) -> list[Manager]:
        """Return the context manager in which a micro-batch draws, the same each time."""
        if self.drawing is None:
            return []
        return [self._managers.setdefault(i, self.drawing(i))]

    def _check_state(self) -> None:
        state, context = ThreadState.capture(), self._context
        if state == self._state and not context.missing() and context.saves_as_here:
            return
        raise RuntimeError(
            "training_step must call the pipeline in the state in which it was called: got another "
            f"{' and '.join(context.differences()) or 'mode'}. With a loss for each micro-batch it "
            "is suspended there. Leave the `with` block before the call, or write "
            "schedule='fill_drain'."
        )


def _refuse_gradient_through_pipeline(error: RuntimeError) -> None:
    """Raise a clear error for autograd's, which finds no way from the outputs to the inputs."""
    if "not have been used in the graph" in str(error):
        raise RuntimeError(_THROUGH_PIPELINE) from error
