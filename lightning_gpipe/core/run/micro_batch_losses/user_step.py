"""The caller's code for the micro-batches of one mini-batch, and its graphs.

For each micro-batch it runs up to its call of the pipeline, then from there to the loss. Each part
is followed, sooner or later, by its backward::

    P   its code up to the call         -->  inputs of the pipeline
    L   outputs  -->  its code to the loss, and backward from the loss to the outputs
    B   gradients of the inputs         -->  backward through the graph of P

If the pipeline is a chain of modules, it is called several times. The code between two calls is a
P, too, and C is the backward through its graph, to the outputs of the call before. These may be in
the graph of the loss as well: their gradients are added up.

If the loss does not depend on P but through the pipeline, as where a head follows the pipeline and
an embedding comes before, backward from the loss frees its graph. With a residual connection around
the pipeline, B needs a part of it again.
"""

from __future__ import annotations

import contextvars
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, NoReturn

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
    has_hooks,
    together,
)
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.autograd_node import HOOK_CALLED_TWICE, StepOutputs
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
    """The graph that the code made before a call, and the time before the code.

    ``hooked`` are the nodes of inputs with hooks on their gradients.
    """

    roots: list[Root | None]
    leaves: list[Tensor]
    nodes: frozenset[Any]
    since: int
    hooked: frozenset[Any]


class UserStep:
    """The caller's code for one mini-batch.

    ``values`` has what it leaves to the layers of each module that it calls, in this order, and
    ``starts`` the first stage of each.

    Attributes:
        results: Its result for each micro-batch, detached.
        drawing: Makes the context manager in which it draws random numbers for a micro-batch.
        ends_elsewhere: Whether other processes run it up to its calls only.
        watched: Makes context managers around it, which record its draws.
        running: The micro-batch for which it runs now; None while it is suspended.
        undisturbed: A ``with`` block in which no worker uses the modules.
        at_work: The stages that may work, of the modules that it has called.
        answers: Numbers what processes compute together in the exchange.
    """

    def __init__(
        self,
        function: Function,
        m: int,
        losses: Losses,
        context: Context,
        outside: OutsideGradients,
        values: Sequence[ValuesOnLayers],
        starts: Sequence[int],
    ) -> None:
        self.m = m
        self.losses = losses
        self.results: list[Any] = [None] * m
        self._function = function
        self._context = context
        self._backward_context = context.without_autocast()  # which is for forwards
        self._outside = outside
        self._values = values
        self._starts = starts
        self.drawing: Callable[[int], Manager] | None = None
        self.watched: Callable[[], list[Manager]] = list
        self.ends_elsewhere = False
        self._drawn: tuple[set[str], set[str]] = set(), set()  # from where, before and after calls
        self._managers: dict[int, Manager] = {}
        self._coroutines: dict[int, Coroutine] = {}
        self.running: int | None = None
        self.undisturbed: Manager = NOTHING
        self.at_work: set[int] = set()
        self.exchange: Exchange | None = None
        self.answers = count()
        self.trained: Sequence[Tensor] = ()
        self._state = ThreadState.capture()
        # Of the calls whose backward has not come.
        self._before: dict[int, list[_GraphBefore]] = defaultdict(list)
        self._outputs: dict[int, list[StepOutputs]] = defaultdict(list)

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
        starts, calls = self._starts, len(self._before[i])
        if calls == len(starts) or program.stages.start != starts[calls]:
            self._refuse_order(program.stages.start, calls)
        self._check_state()
        call = Call(inputs, program, terms, contextvars.copy_context(), told)
        presented: Presented = self._coroutines[i].suspend(call)
        outputs, handed_out = presented
        return outputs, [self.losses.weighted(i, term) for term in handed_out]

    def prepare(self, i: int) -> Call | None:
        """Run it for micro-batch ``i`` up to its call; None if it returned without one."""
        since = now()
        for values in self._values if not i else ():
            values.begin()
        variables = self._context.variables
        coroutine = self._coroutines[i] = Coroutine(partial(self._function, i), variables.copy())
        call = self._resume(i)
        if coroutine.ended:
            self.results[i] = self._end(i, call)
            return None
        return self._at_call(i, call, since)

    def go_on(self, i: int, outputs: FlatTree, presented: Callable[[FlatTree], Presented]) -> Call:
        """Run it for micro-batch ``i`` from the outputs of a call to the next call."""
        call = self._continue(i, outputs, presented)
        if self._coroutines[i].ended:
            self._refuse_order(None, len(self._before[i]))
        return self._at_call(i, call, self._before[i][0].since)

    def finish(
        self, i: int, outputs: FlatTree, presented: Callable[[FlatTree], Presented]
    ) -> Gradients:
        """Run it for micro-batch ``i`` from the outputs to its loss, and the loss's backward.

        ``presented`` converts the outputs, in the code's graph, to the result of its call. Return
        the gradients of the leaves of the outputs; none if there are none.
        """
        result = self._continue(i, outputs, presented)
        for values in self._values if self.m > 1 else ():
            values.at_end(i)
        for each in self._outputs[i]:
            each.allow_backward()
        loss_and_seed = self.losses.add(i, result)
        self.results[i] = self._end(i, result)
        del result
        if loss_and_seed is None:
            self._outputs[i].pop()
            return []
        loss, seed = loss_and_seed
        self._run_backward(i, [root_of(loss)], [seed], keep=partial(self._is_needed, i))
        return self._outputs[i].pop().take_gradients()

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

    def go_back(self, i: int, gradients: Gradients) -> Gradients:
        """Run backward from the inputs of the latest call for micro-batch ``i``.

        Return the gradients of the leaves of the outputs of the call before; none if there is none.
        """
        before, outputs = self._before[i].pop(), self._outputs[i]
        if gradients and before.roots:
            keep = partial(self._is_needed, i) if outputs else _is_not_needed
            self._run_backward(i, before.roots, gradients, keep=keep)
        return outputs.pop().take_gradients() if outputs else []

    def leaves_before_calls(self) -> Iterator[Tensor]:
        """Yield the leaves that will get gradients from the code before its calls."""
        for before in chain.from_iterable(self._before.values()):
            yield from before.leaves

    def close(self, error: BaseException) -> None:
        """End suspended code; errors of its ``finally`` blocks become notes of ``error``."""
        for coroutine in self._coroutines.values():
            try:
                coroutine.close()
            except BaseException as raised:
                add_note(error, f"while training_step was ended: {type(raised).__name__}: {raised}")
        self._before.clear()  # the user may keep the error, and with it this
        self._outputs.clear()

    def _at_call(self, i: int, call: Any, since: int) -> Call:
        assert isinstance(call, Call), "it was suspended by its call"
        self.at_work.update(call.program.stages)
        roots = roots_of(call.inputs.leaves)
        values = self._values[len(self._before[i])]
        kept = values.at_call(i, self._context.variables, call.variables)  # which stages use, too
        until = [node for _, node in self._ends(i)] if self._outputs[i] else ()
        leaves, nodes = graph_behind([*roots, *map(root_of, kept)], until=until)
        tensors = [x for x in call.inputs.leaves if isinstance(x, Tensor)]
        hooked = frozenset(x.grad_fn for x in tensors if not x.is_leaf and has_hooks(x))
        self._before[i].append(_GraphBefore(roots, leaves, frozenset(nodes), since, hooked))
        return call

    def _continue(
        self, i: int, outputs: FlatTree, presented: Callable[[FlatTree], Presented]
    ) -> Any:
        sources = [] if i else [*self.trained]  # the code is the same for all
        for before in () if i else self._before[i]:
            sources += before.leaves
        step_outputs = StepOutputs(outputs, sources, _THROUGH_PIPELINE)
        self._outputs[i].append(step_outputs)
        try:
            return self._resume(i, presented(step_outputs.outputs))
        except RuntimeError as error:
            _refuse_gradient_through_pipeline(error)
            raise

    def _ends(self, i: int) -> list[tuple[Tensor, Any]]:
        ends = []
        for each in self._outputs[i]:
            if each.end is not None:
                ends.append(each.end)
        return ends

    def _is_needed(self, i: int, nodes: set[Any]) -> bool:
        """Return whether another backward needs some of these nodes of micro-batch ``i``."""
        for before in self._before[i]:
            if not before.hooked.isdisjoint(nodes):
                raise RuntimeError(HOOK_CALLED_TWICE)
            if not before.nodes.isdisjoint(nodes):
                return True
        return any_saved_before(nodes, self._before[i][0].since)

    def _refuse_order(self, start: int | None, calls: int) -> NoReturn:
        """Refuse a call of the module whose stages begin at ``start``, or for None the end."""
        if len(self._starts) == 1:
            raise RuntimeError(
                "training_step must call the pipeline once, with a loss for each micro-batch: got "
                "a second call. Put both inputs into one batch, or write schedule='fill_drain'."
            )
        name_of: dict[int | None, str] = {
            j: f"a call of module[{k}]" for k, j in enumerate(self._starts)
        }
        got, wanted = (name_of.get(j, "its end") for j in (start, [*self._starts, None][calls]))
        raise RuntimeError(
            "training_step must call each module of a chain once, in the order of module=[...], "
            f"with a loss for each micro-batch: got {got} where {wanted} is next. List the modules "
            "as training_step always calls them, or write schedule='fill_drain'."
        )

    def _resume(self, i: int, value: Any = None) -> Any:
        watched, called = self.watched(), bool(self._before[i])
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
        assert self._coroutines[i].ended, "another call raises in the code"
        return map_tensors(Tensor.detach, result)

    def _run_backward(
        self,
        i: int,
        roots: Sequence[Root | None],
        gradients: Gradients,
        *,
        keep: Callable[[set[Any]], bool],
    ) -> None:
        with together([self._backward_context.entered(), *self._own(i)]):
            try:
                self._outside.backward(roots, gradients, ends=self._ends(i), keep=keep)
            except RuntimeError as error:
                refuse_second_backward(error)
                raise
        for each in self._outputs[i]:
            each.add_up()

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


def _is_not_needed(nodes: set[Any]) -> bool:
    return False


def _refuse_gradient_through_pipeline(error: RuntimeError) -> None:
    """Raise a clear error for autograd's, which finds no way from the outputs to the inputs."""
    if "not have been used in the graph" in str(error):
        raise RuntimeError(_THROUGH_PIPELINE) from error
