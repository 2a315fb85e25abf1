"""The caller's code for the micro-batches of one mini-batch, and the graphs that it makes.

For each micro-batch it runs up to its call of the pipeline, then from there to the loss. Each part
is followed, sooner or later, by the backward of what it computed::

    P   its code up to the call         -->  inputs of the pipeline
    L   outputs  -->  its code to the loss, and backward from the loss to the outputs
    B   gradients of the inputs         -->  backward through what P computed

If nothing that P computed is in the loss, as where a head follows the pipeline and an embedding
comes before, backward from the loss frees its graph. With a residual connection around the
pipeline, B needs a part of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gpipe.core.data import FlatTree, map_tensors
from lightning_gpipe.core.faithful import Context, Manager, ThreadState, add_note, together
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.run.autograd import HandedOut
from lightning_gpipe.core.run.coroutine import Coroutine
from lightning_gpipe.core.run.gradients import Gradients
from lightning_gpipe.core.run.losses import Losses
from lightning_gpipe.core.run.roots import Root, any_saved_before, graph_behind, now, root_of
from lightning_gpipe.core.run.surroundings import Surroundings

Function = Callable[[int], Any]  # runs the caller's code for a micro-batch, and returns its result


class Call(NamedTuple):
    """A call of the pipeline by the caller's code.

    Attributes:
        inputs: What it was called with.
        program: What the stages are to run, if that is not their layers.
    """

    inputs: FlatTree
    program: Program | None


class _Before(NamedTuple):
    """What the code computed before its call: where its graph starts, and when it was begun."""

    roots: list[Root | None]
    nodes: frozenset[Any]
    since: int


class Code:
    """The caller's code for one mini-batch.

    Args:
        function: Runs it for a micro-batch.
        m: The number of micro-batches.
        losses: What it returns.
        context: The thread-local state to run it in.
        surroundings: The parameters that it uses.

    Attributes:
        results: What it returned for each micro-batch, detached.
        running: The micro-batch for which it runs now; None while it is suspended.
    """

    def __init__(
        self,
        function: Function,
        m: int,
        losses: Losses,
        context: Context,
        surroundings: Surroundings,
    ) -> None:
        self.m = m
        self.losses = losses
        self.results: list[Any] = [None] * m
        self._function = function
        self._context = context
        # That of its backward: autocast is for forwards.
        self._backward_context = context.without_autocast()
        self._surroundings = surroundings
        self._drawing: Callable[[int], Manager] | None = None
        self._watched: Callable[[], list[Manager]] = list
        self._managers: dict[int, Manager] = {}
        self._coroutines: dict[int, Coroutine] = {}
        self._called: set[int] = set()
        self.running: int | None = None
        self._state = ThreadState.capture()
        self._before: dict[int, _Before] = {}

    def draw_by(self, drawing: Callable[[int], Manager] | None) -> None:
        """Set the context managers in which it draws random numbers, one for each micro-batch."""
        self._drawing = drawing

    def watch_by(self, watched: Callable[[], list[Manager]]) -> None:
        """Set what makes context managers that tell its draws from those of layers."""
        self._watched = watched

    @property
    def current(self) -> bool:
        """Whether the calling code is this."""
        i = self.running
        return i is not None and self._coroutines[i].current

    def call(self, inputs: FlatTree, program: Program | None) -> FlatTree:
        """Call the pipeline, in this code; returns its outputs in the caller's graph.

        Raises:
            RuntimeError: If it was called before for this micro-batch, or in another state than
                that in which the code was begun.
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
        outputs: FlatTree = self._coroutines[i].suspend(Call(inputs, program))
        return outputs

    def prepare(self, i: int) -> Call | None:
        """Run it for micro-batch ``i`` up to its call; None if it returned without one."""
        since = now()
        coroutine = self._coroutines[i] = Coroutine(partial(self._function, i))
        call = self._resume(i)
        if coroutine.ended:
            self.results[i] = self._end(i, call)
            return None
        assert isinstance(call, Call), "it was suspended by its call"
        roots = [root_of(leaf) for leaf in call.inputs.leaves]
        nodes = frozenset(graph_behind(roots)[1])
        self._before[i] = _Before(roots, nodes, since)
        return call

    def finish(
        self, i: int, outputs: FlatTree, presented: Callable[[FlatTree], FlatTree]
    ) -> Gradients:
        """Run it for micro-batch ``i`` from the outputs to its loss, and the loss's backward.

        Args:
            i: The micro-batch.
            outputs: What the stages gave.
            presented: Makes of that, in the code's graph, what its call returns.

        Returns:
            The gradients of the leaves of the outputs; none if there are none.
        """
        handed = HandedOut(outputs)
        result = self._resume(i, presented(handed.outputs))
        step = self.losses.add(i, result)
        self.results[i] = self._end(i, result)
        del result
        if step is None:
            return []
        loss, seed = step
        before = self._before[i]
        del step

        def keep(nodes: set[Any]) -> bool:
            shared = not before.nodes.isdisjoint(nodes)
            return shared or any_saved_before(nodes, before.since)

        ends = () if handed.anchor is None else (handed.anchor,)
        self._run_backward(i, [root_of(loss)], [seed], ends=ends, keep=keep)
        return handed.take_gradients()

    def skip(self, i: int) -> None:
        """Add the result of micro-batch ``i``, which was returned without a call.

        Raises:
            RuntimeError: If it is a loss.
        """
        if self.results[i] is not None:
            raise RuntimeError(
                "training_step must call the pipeline once for each micro-batch: got a result for "
                f"micro-batch {i} without a call. A step that returns None skips the batch; "
                "schedule='fill_drain' allows any."
            )
        self.losses.add(i, None)

    def go_back(self, i: int, gradients: Gradients) -> None:
        """Run backward through what it computed before its call.

        Args:
            i: The micro-batch.
            gradients: Those of the leaves of the inputs; none if there are none.
        """
        before = self._before.pop(i)
        if gradients:
            self._run_backward(i, before.roots, gradients)
        self._managers.pop(i, None)

    def close(self, error: BaseException | None) -> None:
        """End what was begun, so that its ``finally`` blocks run.

        Args:
            error: Why; gets a note of what they raise.
        """
        for coroutine in self._coroutines.values():
            try:
                coroutine.close()
            except BaseException as raised:
                if error is None:
                    raise
                add_note(error, f"while training_step was ended: {type(raised).__name__}: {raised}")
        self._coroutines.clear()
        self._before.clear()
        self._managers.clear()

    def _resume(self, i: int, value: Any = None) -> Any:
        with together([*self._watched(), self._context.entered(), *self._own(i)]):
            self._state = ThreadState.capture()
            self.running = i
            try:
                return self._coroutines[i].resume(value)
            finally:
                self.running = None

    def _end(self, i: int, result: Any) -> Any:
        """Forget the code of a micro-batch; returns its result without its graph."""
        if not self._coroutines[i].ended:
            raise AssertionError("a second call raises in the code")
        del self._coroutines[i]
        return map_tensors(Tensor.detach, result)

    def _run_backward(
        self, i: int, roots: Sequence[Root | None], gradients: Gradients, **options: Any
    ) -> None:
        with together([self._backward_context.entered(), *self._own(i)]):
            self._surroundings.backward(roots, gradients, **options)

    def _own(self, i: int) -> list[Manager]:
        """The context manager in which a micro-batch draws, always the same."""
        if self._drawing is None:
            return []
        return [self._managers.setdefault(i, self._drawing(i))]

    def _check_state(self) -> None:
        """Raise if the code has changed the thread's state, which it shares with other code."""
        state, context = ThreadState.capture(), self._context
        if state == self._state and not context.missing() and context.saves_as_here:
            return
        raise RuntimeError(
            "training_step must call the pipeline in the state in which it was called: got another "
            f"{' and '.join(context.differences()) or 'mode'}. With a loss for each micro-batch it "
            "is suspended there. Leave the `with` block before the call, or write "
            "schedule='fill_drain'."
        )
