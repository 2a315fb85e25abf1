"""One mini-batch's pass through a stage: forward, recompute and backward of each micro-batch.

A stage has a small graph of its own for each micro-batch: the inputs are its leaves, and the
outputs are detached from it. The gradients of the outputs come from other stages, and those of the
inputs go to other stages. So the graphs of different stages are never joined, each worker runs
backward on its own thread, and dropping a micro-batch's activations means freeing its graph. What
comes and leaves by routes are further inputs and outputs, joined with the others.

A pass holds everything that is alive between its forward and its backward. Several may exist at
once, if a user runs the pipeline twice before one backward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import (
    FlatTree,
    Term,
    bytes_of,
    join,
    parted,
    receiving,
    requires_grad,
    tree_flatten,
    tree_unflatten,
)
from lightning_gpipe.core.faithful import (
    NOTHING,
    RECOMPUTING,
    Behavior,
    Context,
    Manager,
    MutationGuard,
    Randomness,
    RowWatch,
    Shadows,
    together,
)
from lightning_gpipe.core.plan import CALLER
from lightning_gpipe.core.run.asides import Asides
from lightning_gpipe.core.run.borders import apart, gradients_in, sent
from lightning_gpipe.core.run.captures import Captures
from lightning_gpipe.core.run.checks import check_edits, check_hooks, check_unchanged
from lightning_gpipe.core.run.kept import Kept
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.roots import now, root_of, roots_of
from lightning_gpipe.core.run.side_channels import warn_of_attributes
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.weights import Weights
from lightning_gpipe.core.run.work import Work

_NO_TERMS = tree_flatten([])


class StagePass:
    """One mini-batch's pass through a stage; used by one worker at a time.

    Args:
        stage: The stage.
        work: What it does with each micro-batch.
        context: The caller's thread-local state in forward.
        recomputed: The micro-batches whose activations are dropped.
        randomness: Where random numbers come from.
        shadows: What collects the gradients of the stage's parameters.
        participation: Where to record which parameters take part.
        watch: Notices layers that mix rows; None in most mini-batches.
        terms: Whether to collect loss terms.
        split: Whether backward leaves the gradients of the weights to an action of their own.

    Attributes:
        stage, work, randomness, shadows, terms: As given.
        statistics: The statistics of the stage's batch norms, if they are deferred.
        asides: Watches for gradients that do not come through the outputs.
    """

    def __init__(
        self,
        stage: Stage,
        work: Work,
        context: Context,
        recomputed: frozenset[int],
        randomness: Randomness,
        shadows: Shadows,
        participation: Participation,
        watch: RowWatch | None = None,
        *,
        terms: bool = False,
        split: bool = False,
    ) -> None:
        self.stage = stage
        self.work = work
        self.randomness = randomness
        self.shadows = shadows
        self.terms = terms
        self.statistics = stage.statistics()
        self._context = context
        self._recomputed = recomputed
        self._watch = watch
        # Whether a first forward needs no context manager but that of the shadows.
        self._bare = not (randomness.redirected or self.statistics or watch or terms)
        self._routed = bool(work.leaving or terms)  # whether its outputs leave on several ways
        ends = [stage.partition.index == 0, *(route.source == CALLER for route in work.arriving)]
        self._from_caller = any(ends)
        self._modules = stage.modules
        self._flags = stage.training_flags
        self._microbatches: dict[int, Kept] = {}
        self._captures = Captures(participation, Weights(stage.splits) if split else None)
        self.asides = Asides(stage, shadows)
        self._terms: dict[int, FlatTree] = {}
        self._latest: tuple[Any, Behavior] | None = None  # for the latest structure of inputs
        self._differs: bool | None = None  # whether the state in backward differs from forward's

    def forward(self, i: int, inputs: FlatTree) -> FlatTree:
        """Run the layers on micro-batch ``i``.

        Args:
            i: The micro-batch.
            inputs: What comes with the micro-batch; if anything comes by routes, joined with that.

        Returns:
            What goes on with the micro-batch; if anything leaves by routes, joined with that. All
            is detached from this stage's graph.
        """
        behavior = self._behavior(inputs)
        if not self._context.grad:
            outputs, self._terms[i] = self._run(i, inputs, behavior, first=True)
            return outputs
        since = now()
        searching = behavior.searching or self._captures.searching
        self.asides.watch_inputs(inputs.leaves)
        if i in self._recomputed:
            self.randomness.save(i)
            before = self.stage.state.before(behavior)
            hooks = self._context.dropping()
            outputs, terms = self._run(i, inputs, behavior, first=True, hooks=hooks)
            if self.stage.last:
                outputs = apart(outputs, inputs)
            leaves = [*outputs.leaves, *terms.leaves]
            needed = any(map(requires_grad, leaves))
            if needed and searching:
                self._captures.record(behavior, inputs.leaves, leaves, since)
            saved = self.stage.state.after(behavior, before)
            kept = Kept.dropped(inputs, saved, len(terms.leaves))  # its sizes come with its roots
        else:
            hooks = self._context.saving()
            outputs, terms = self._run(i, inputs, behavior, first=True, hooks=hooks)
            leaves = [*outputs.leaves, *terms.leaves]
            roots = roots_of(leaves)
            kept = Kept(inputs, roots, sizes=self._sizes(outputs, terms) if self._routed else ())
            needed = bool(roots)
            if needed and searching:
                self._captures.record(behavior, inputs.leaves, leaves, since)
        if needed:
            self._microbatches[i] = kept
        if self.terms:
            self._terms[i] = terms.detached()
        return sent(outputs, self.stage.partition.index, self.work.leaving)

    def take_terms(self, i: int) -> FlatTree:
        """The loss terms of micro-batch ``i``, detached like its outputs; no longer held here."""
        return self._terms.pop(i)

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch ``i`` again, to build its graph."""
        if i in self._microbatches:  # else nothing in it requires a gradient
            self._context.variables.copy().run(self._repeat, i)

    def backward(self, i: int, gradients: FlatTree) -> FlatTree:
        """Compute the gradients of the inputs from those of the outputs, leaf by leaf.

        Both are ordered as in :meth:`forward`, what travels by routes included; ``gradients`` end
        with those of the loss terms. What came back on one way may have no leaves: there are no
        gradients then. The gradients of the parameters stay in :attr:`shadows`.

        Returns:
            One leaf per input, or none if nothing requires a gradient.
        """
        kept = self._microbatches.pop(i, None)
        if kept is None:
            return FlatTree([])  # nothing in it requires a gradient
        leaves, roots = kept.inputs.leaves, kept.roots
        assert roots is not None, "recompute comes before backward in every schedule"
        if self._routed:
            gradients = _filled(gradients, kept.sizes)
        elif not gradients.leaves:
            roots = []
        drawing = self.randomness.drawing_in_backward(i)
        if drawing is NOTHING:
            self._captures.run_backward(i, leaves, roots, gradients.leaves)
        else:
            with drawing:
                self._captures.run_backward(i, leaves, roots, gradients.leaves)
        if kept.former:
            self.asides.check_inputs(kept.former)
        return FlatTree(gradients_in(leaves), kept.inputs.spec)

    def weights(self, i: int) -> None:
        """Compute the gradients of the parameters that backward of micro-batch ``i`` has left."""
        with self.randomness.drawing_in_backward(i):
            self._captures.run_weights(i)

    def kept_for_weights(self, i: int) -> list[Tensor]:
        """What is kept until then; the parameters and what a tensor shares memory with included."""
        return self._captures.kept_for_weights(i)

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The sums of the gradients of parameters and captured leaves, no longer held here."""
        return [*self.shadows.take_gradients(), *self._captures.take_gradients()]

    def check_unchanged(self) -> None:
        """Raise if a recomputation would not compute what forward computed."""
        if self._recomputed:
            check_unchanged(self.stage, self.shadows, self._modules, self._microbatches.values())

    def finish_forward(self) -> None:
        """Update running statistics, and record the version counters of the parameters.

        Raises:
            RuntimeError: If a layer registered a hook on one of its parameters while it ran, or
                edited one in a way that cannot be honoured.
        """
        check_hooks(self.stage, self.shadows)
        check_edits(self.stage, self.shadows)
        if self._watch is not None:
            self._watch.close()
        self.shadows.record_versions()
        if self.statistics is not None:
            self.statistics.commit()

    def release(self) -> Asides:
        """Free everything that was kept for backward, and return what watches its leaves."""
        self._microbatches.clear()
        self._captures.clear()
        return self.asides

    def _repeat(self, i: int) -> None:
        RECOMPUTING.set(True)  # in the copied context variables
        former = self._microbatches[i].inputs.leaves
        if managers := self._as_in_forward():
            with together(managers):
                inputs, outputs, terms = self._run_again(i)
        else:
            inputs, outputs, terms = self._run_again(i)
        if len(terms.leaves) != self._microbatches[i].terms:
            raise RuntimeError(
                "a layer must hand out the same loss terms when its forward is recomputed: got "
                f"others in {self.stage}. Do not let them depend on what forward changes."
            )
        self.asides.watch_inputs(inputs.leaves)
        roots = list(map(root_of, (*outputs.leaves, *terms.leaves)))
        sizes = self._sizes(outputs, terms) if self._routed else ()
        # What required no gradient is not detached, and a layer may ask for one now.
        former = [one for one, two in zip(former, inputs.leaves, strict=True) if one is not two]
        self._microbatches[i] = Kept(inputs, roots, sizes=sizes, former=former)

    def _run_again(self, i: int) -> tuple[FlatTree, FlatTree, FlatTree]:
        """Do the work of micro-batch ``i`` again; returns its inputs and what :meth:`_run` does."""
        # Without hooks that layers registered on the inputs in forward.
        inputs = self._microbatches[i].inputs.detached()
        behavior, hooks = self._behavior(inputs), self._context.saving()
        return inputs, *self._run(i, inputs, behavior, first=False, hooks=hooks)

    def _as_in_forward(self) -> list[Manager]:
        """The context managers that restore the thread's and the modules' state of forward."""
        context = self._context
        if self._differs is None:  # the same for all micro-batches
            other_flags = self.stage.training_flags != self._flags
            self._differs = bool(context.missing() or context.modes or other_flags)
        if not self._differs:
            return []
        return [context.entered(), context.modes.entered(), self.stage.training_as(self._flags)]

    def _run(
        self,
        i: int,
        inputs: FlatTree,
        behavior: Behavior,
        *,
        first: bool,
        hooks: Manager = NOTHING,
    ) -> tuple[FlatTree, FlatTree]:
        """Do the work; returns what goes on, joined with what leaves by routes, and terms.

        Args:
            i: The micro-batch.
            inputs: Its inputs.
            behavior: The layers' behavior.
            first: Whether it is the first time, and no recomputation.
            hooks: Applied to what autograd saves.
        """
        stage, work = self.stage, self.work
        # The caller must not find its tensors edited.
        marked = not self._context.grad and not self._from_caller
        guard = MutationGuard(behavior, inputs.leaves, marked=marked)
        if guard.leaves is not inputs.leaves:
            inputs = FlatTree(guard.leaves, inputs.spec)
        arrived = tree_unflatten(inputs)
        terms: list[Term] = []
        bare = first and self._bare and self.shadows.in_place
        if not work.arriving:
            arrived = [arrived]
        if bare and hooks is NOTHING:  # to enter what does nothing takes as long as a small layer
            outputs, *leaving = work.run(arrived, guard)
        else:
            with self._around(i, terms, hooks, first=first):
                outputs, *leaving = work.run(arrived, guard)
        guard.close()
        if guard.first:
            warn_of_attributes(stage, outputs.leaves)
        if leaving:
            for route, (leaves, _) in zip(stage.leaving, leaving, strict=False):  # those of skips
                stage.skip_bytes[route.name] = sum(bytes_of(x) for x in leaves if x is not None)
            outputs = join([outputs, *leaving])
        return outputs, tree_flatten(terms) if terms else _NO_TERMS

    def _around(self, i: int, terms: list[Term], hooks: Manager, *, first: bool) -> Manager:
        """The context managers in which the layers run, without those that are not needed."""
        draws = self.randomness.drawing(i) if first else self.randomness.replaying(i)
        found = [hooks, *draws]
        if not self.shadows.in_place:
            found.append(self.shadows.swapped_in(self.stage.journal))
        if self.statistics is not None:
            found.append(self.statistics.collecting(self.stage.journal, record=first))
        if self._watch is not None and first:
            found.append(self._watch.watching(i, self.stage.journal))
        if self.terms:
            found.append(receiving(terms.append))
        if not first:  # after the shadows, which replace frozen parameters too
            saved = self._microbatches[i].saved
            assert saved is not None, "kept for every micro-batch that is recomputed"
            found += saved.swapped_in(self.stage.journal)
        return together(found)

    def _sizes(self, outputs: FlatTree, terms: FlatTree) -> tuple[int, ...]:
        """The number of the leaves on each of several ways."""
        ways = parted(outputs) if self.work.leaving else [outputs]
        return tuple(len(each.leaves) for each in (*ways, *([terms] if self.terms else [])))

    def _behavior(self, inputs: FlatTree) -> Behavior:
        latest, spec = self._latest, inputs.spec
        if latest is None or (latest[0] is not spec and latest[0] != spec):
            structure = spec, self.work.signature
            self._latest = latest = spec, self.stage.behavior(self._flags, structure)
        return latest[1]


def _filled(gradients: FlatTree, sizes: Sequence[int]) -> FlatTree:
    """The gradients, with None for all leaves of a way on which there are none."""
    ways = zip(parted(gradients), sizes, strict=True)
    return FlatTree([each for way, size in ways for each in way.leaves or [None] * size])


def in_layers() -> bool:
    """Whether the caller is run by a layer of a pipeline, or by a hook on one."""
    frame = sys._getframe(1)  # no flag that an interrupt could leave set
    while frame.f_back is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame.f_code.co_filename == __file__
