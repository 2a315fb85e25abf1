"""One mini-batch's pass through a stage: forward, recompute and backward of each micro-batch.

A stage has a small graph of its own for each micro-batch: the inputs are its leaves, and the
outputs are detached from it. So the graphs of different stages are never joined, each worker runs
backward on its own thread, and to drop a micro-batch's activations is to free its graph. Values
that come and leave by routes are further inputs and outputs, joined with the others.
"""

from __future__ import annotations

import contextvars
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain, repeat
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from lightning_gpipe.core.data import (
    FlatTree,
    Term,
    bytes_of,
    join,
    parted,
    receiving,
    refuse_means,
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
    ModuleState,
    MutationGuard,
    Randomness,
    RowWatch,
    Shadows,
    together,
)
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.run.activations import Activations, versions_in
from lightning_gpipe.core.run.backward.leaves import UsedLeaves
from lightning_gpipe.core.run.backward.roots import Root, now, root_of, roots_of, small_and_apart
from lightning_gpipe.core.run.backward.stage_backward import StageBackward
from lightning_gpipe.core.run.backward.sums import Pair
from lightning_gpipe.core.run.divided_weights import with_values
from lightning_gpipe.core.run.gradient_home import GradientTransfer
from lightning_gpipe.core.run.guards.forbidden_edits import (
    check_edits,
    check_inputs_unchanged,
    check_unchanged,
)
from lightning_gpipe.core.run.guards.lost_gradients import LostGradients
from lightning_gpipe.core.run.guards.shared_objects import warn_of_attributes
from lightning_gpipe.core.run.host.memory import HostMemory
from lightning_gpipe.core.run.host.waiting_activations import returned
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.run.stage_borders import apart, filled, gradients_in, sent
from lightning_gpipe.core.run.work import Work


class StagePass:
    """One mini-batch's pass through a stage; used by one worker at a time.

    It holds all that lives from its forward to its backward. Several may be alive at once.

    Args:
        work: The work of the stage on each micro-batch that has no other one.
        context: The caller's thread-local state in forward.
        recomputed: The micro-batches whose activations are dropped.
        watch: Notices layers that mix rows; None in most mini-batches.
        split: Whether backward leaves the gradients of the weights to an action of their own.

    Attributes:
        variables: The context variables in which it runs; None for those of the worker.
        editors: The titles of the layers that edited its inputs in a first run.
    """

    transfer: GradientTransfer | None = None
    editors: Collection[str] = ()

    def __init__(
        self,
        stage: Stage,
        work: Work,
        context: Context,
        recomputed: frozenset[int],
        randomness: Randomness,
        shadows: Shadows,
        used_leaves: UsedLeaves,
        watch: RowWatch | None = None,
        *,
        split: bool = False,
    ) -> None:
        self.stage = stage
        self.randomness = randomness
        self.shadows = shadows
        self.host = HostMemory(stage, shadows) if stage.has_visits else None
        self.statistics = stage.statistics()
        self._context = context
        self._recomputed = recomputed
        self.begin(work, watch)
        # Whether nothing but marked inputs is guarded; the caller must not find its own edited.
        self._marked = not (context.grad or stage.partition.index == 0)
        self._copies = bool(stage.followed)
        self._modules = stage.modules
        self._flags = stage.training_flags
        self._activations: dict[int, Activations] = {}
        self._backward = StageBackward(used_leaves, stage.splits if split else None)
        self.lost_gradients = LostGradients(stage, shadows)
        self._latest: tuple[Any, Work, Behavior] | None = None  # of the latest structure of inputs
        self._left: list[Pair] | None = None  # once the others were sent home
        self._differs: bool | None = None  # whether the state in backward differs from forward's

    def begin(
        self,
        work: Work,
        watch: RowWatch | None,
        *,
        variables: contextvars.Context | None = None,
    ) -> None:
        """Set the work, and the context variables of its call if that is not the first.

        Called before its first inputs are sent.
        """
        self.works: dict[int, Work] = defaultdict(repeat(work).__next__)
        self._watch = watch
        # Whether a first forward needs no context manager but that of the shadows.
        self._bare = not (self.randomness.private or self.statistics or watch or work.terms)
        self.variables = variables
        if variables is not None:
            self._context = self._context._replace(variables=variables)

    def set_program(self, i: int, program: Program, *, terms: bool) -> None:
        """Let micro-batch ``i`` run another program; called before its inputs are sent."""
        self.works[i] = Work(self.stage, program, terms=terms)
        self._bare &= not terms

    def forward(self, i: int, inputs: FlatTree) -> FlatTree:
        """Run the layers; return outputs in no graph, joined with those that leave by routes."""
        work, behavior = self.works[i], self._behavior(i, inputs)
        if not self._context.grad:
            return self._run(i, inputs, behavior, first=True)
        since = now()
        searching = behavior.searching or self._backward.searching
        self.lost_gradients.watch_inputs(inputs.leaves)
        saved: ModuleState | None = None
        if i in self._recomputed:
            self.randomness.save(i)
            saved, hooks = self.stage.state.capture(behavior), self._context.dropping()
        elif self.host is not None:
            hooks = self.host.saving(self._context, i)
        else:
            hooks = self._context.saving()
        outputs = self._run(i, inputs, behavior, first=True, hooks=hooks)
        if saved is not None and self.stage.last:
            outputs = apart(outputs, inputs)
        roots = roots_of(outputs.leaves) if saved is None else None
        needed = any(map(requires_grad, outputs.leaves)) if roots is None else bool(roots)
        if needed and searching:  # before the comparison, because it tells what to save
            self._backward.record(behavior, inputs.leaves, outputs.leaves, since)
        if saved is not None:
            saved.compare(behavior)
        if needed:
            versions = () if saved is None else versions_in(inputs)
            sizes = _sizes(outputs, work)
            self._activations[i] = Activations(inputs, roots, saved, versions, sizes)
        return sent(outputs, self.stage.partition.index, work.leaving)

    def check_inputs(self, i: int) -> None:
        """Raise if the caller's code has edited an input that forward ``i`` is repeated with."""
        if i in self._activations:
            check_inputs_unchanged(self.stage, [self._activations[i]])

    def recompute(self, i: int) -> None:
        if i in self._activations:  # else nothing in it requires a gradient
            self._context.variables.copy().run(self._repeat, i)

    def backward(self, i: int, gradients: FlatTree) -> FlatTree:
        """Compute the gradients of the inputs from those of the outputs, leaf by leaf.

        Both are ordered as in :meth:`forward`, with those that travel by routes. A way without
        gradients may have no leaves. The gradients of the parameters stay in :attr:`shadows`.
        """
        activations = self._activations.pop(i, None)
        if activations is None:
            return FlatTree([])  # nothing in it requires a gradient
        leaves, roots = activations.inputs.leaves, activations.roots
        assert roots is not None, "recompute comes before backward in every schedule"
        if activations.sizes:
            gradients = filled(gradients, activations.sizes)
        elif not gradients.leaves:
            roots = []
        drawing = self.randomness.drawing_in_backward(i)
        if self._copies:
            drawing = self._with_copies(drawing)
        if drawing is NOTHING:
            entered = self._backward.run(i, leaves, roots, gradients.leaves)
        else:
            with drawing:
                entered = self._backward.run(i, leaves, roots, gradients.leaves)
        if activations.former:
            self.lost_gradients.check_inputs(activations.former)
        computed = gradients_in(leaves)
        if self.shadows.without_gradient:
            self.shadows.own_gradients([*gradients.leaves, *computed, *entered])
        return FlatTree(computed, activations.inputs.spec)

    @property
    def at_once(self) -> bool:
        """True if :meth:`backwards` is faster than :meth:`backward` of each, and the same."""
        around = self._copies or self.host is not None or self.randomness.in_backward is not None
        if around or self._backward.any_captured:
            return False
        kept = self._activations.values()
        return small_and_apart((each.roots or (), each.inputs.leaves) for each in kept)

    def backwards(self, indices: Sequence[int], gradients: Sequence[FlatTree]) -> list[FlatTree]:
        """Compute the same as :meth:`backward` of each micro-batch, in one call of autograd.

        Those that ran last come first, the order of autograd. None was recomputed.
        """
        passed = [self._activations.pop(i, None) for i in indices]
        roots: list[Root | None] = []
        values: list[Tensor | None] = []
        for activations, given in zip(passed, gradients, strict=True):
            if activations is not None:
                given = filled(given, activations.sizes) if activations.sizes else given
                if given.leaves:
                    roots += activations.roots or ()
                    values += given.leaves
        self._backward.run(indices[0], (), roots, values)
        computed = [
            FlatTree([])
            if each is None
            else FlatTree(gradients_in(each.inputs.leaves), each.inputs.spec)
            for each in passed
        ]
        self.shadows.own_gradients([*values, *chain.from_iterable(x.leaves for x in computed)])
        return computed

    def leave(self, i: int) -> None:
        """Let the tensors held for micro-batch ``i`` wait on the host for its backward."""
        activations = self._activations.get(i)
        assert self.host is not None and self.host.activations is not None, "they wait there"
        if activations is None:
            return
        if activations.roots is not None:
            self.host.activations.leave(i)
        else:
            inputs = self.host.activations.take(i, activations.inputs)
            self._activations[i] = activations._replace(inputs=inputs, versions=versions_in(inputs))

    def weights(self, i: int) -> None:
        """Compute the gradients of the parameters that backward of micro-batch ``i`` has left."""
        drawing = self.randomness.drawing_in_backward(i)
        with self._with_copies(drawing) if self._copies else drawing:
            entered = self._backward.run_weights(i)
        if self.shadows.without_gradient:
            self.shadows.own_gradients(entered)

    def kept_for_weights(self, i: int) -> list[Tensor]:
        """Return the tensors held for :meth:`weights`, parameters and bases of views included."""
        return self._backward.kept_for_weights(i)

    def send_gradients(self) -> None:
        weights = None if self.host is None else self.host.weights
        if self.transfer is None and weights is None:
            return
        gradients: list[Pair] = [*self.shadows.take_gradients()]
        if weights is not None:
            gradients = weights.bring_home(gradients)
        if self.transfer is not None:
            if weights is not None:
                weights.settle()
            gradients = self.transfer.send(self.stage.partition.index, gradients)
        self._left = [*gradients]

    def take_gradients(self, *, written: bool = True) -> list[Pair]:
        """Return the sums of the gradients of parameters and captured leaves, and drop them.

        Without those that were sent home. With ``written``, autograd writes them to ``.grad``.
        """
        gradients: list[Pair] = [*self.shadows.take_gradients()]
        if self._left is not None:
            if gradients:
                raise RuntimeError(
                    "gradients of a stage must be complete after its last backward, when they are "
                    f"sent home: got some later on {self.stage}, from one that "
                    "uses a tensor which its layers have kept. Pass the tensor on with the output."
                )
            gradients, self._left = self._left, None
        if self.stage.divided is not None and self.transfer is None:
            gradients = with_values(gradients, written=written)
        return [*gradients, *self._backward.take_gradients()]

    def check_unchanged(self) -> None:
        if self._recomputed:
            check_unchanged(self.stage, self.shadows, self._modules, self._activations.values())

    def finish_forward(self) -> None:
        """Refuse forbidden edits, update running statistics, and record parameters' versions."""
        weights = None if self.host is None else self.host.weights
        check_edits(self.stage, self.shadows, None if weights is None else weights.take_edited())
        if self._watch is not None:
            self._watch.close()
        self.shadows.record_versions()
        if self.statistics is not None:
            self.statistics.commit()

    def release(self) -> LostGradients:
        self._activations.clear()
        self._backward.clear()
        return self.lost_gradients

    def _with_copies(self, drawing: Manager) -> Manager:
        """Let layers find the copies of their parameters too, in backward: parts may run again."""
        if self.shadows.in_place:
            return drawing
        journal = self.stage.journal
        told = journal.changed([(vars(self.stage), "in_backward", True)])
        return together([drawing, told, self.shadows.swapped_in(journal)])

    def _repeat(self, i: int) -> None:
        RECOMPUTING.set(True)  # in the copied context variables
        forward, work = self._activations[i], self.works[i]
        with self._as_in_forward():
            # Without hooks that layers registered on the inputs in forward.
            inputs, hooks = forward.inputs, self._context.saving()
            if self.host is not None:
                inputs = returned(inputs)
                hooks = self.host.saving(self._context, i, at_once=True)
            inputs = inputs.detached()
            outputs = self._run(i, inputs, self._behavior(i, inputs), first=False, hooks=hooks)
        sizes = _sizes(outputs, work)
        if work.terms and sizes[-1] != forward.sizes[-1]:
            raise RuntimeError(
                "a layer must hand out the same loss terms when its forward is recomputed: got "
                f"others in {self.stage}. Do not let them depend on what forward changes."
            )
        self.lost_gradients.watch_inputs(inputs.leaves)
        roots = list(map(root_of, outputs.leaves))
        # What required no gradient is not detached, and a layer may ask for one now.
        leaves = zip(forward.inputs.leaves, inputs.leaves, strict=True)
        former = [old for old, new in leaves if old is not new]
        self._activations[i] = Activations(inputs, roots, sizes=sizes, former=former)

    def _as_in_forward(self) -> Manager:
        """Return the manager that restores the thread's and the modules' state of forward."""
        context = self._context
        if self._differs is None:  # the same for all micro-batches
            other_flags = self.stage.training_flags != self._flags
            self._differs = bool(context.missing() or context.modes or other_flags)
        if not self._differs:
            return NOTHING
        training = self.stage.training_as(self._flags)
        return together([context.entered(), context.modes.entered(), training])

    def _run(
        self, i: int, inputs: FlatTree, behavior: Behavior, *, first: bool, hooks: Manager = NOTHING
    ) -> FlatTree:
        stage, work = self.stage, self.works[i]
        marked = self._marked and not work.from_caller
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
            self.editors = guard.editors
        if work.terms:
            refuse_means(terms, i)
            leaving.append(tree_flatten(terms))
        if leaving:
            for route, (leaves, _) in zip(work.skips_leaving, leaving, strict=False):
                stage.skip_bytes[route.name] = sum(bytes_of(x) for x in leaves if x is not None)
            outputs = join([outputs, *leaving])
        return outputs

    def _around(self, i: int, terms: list[Term], hooks: Manager, *, first: bool) -> Manager:
        draws = self.randomness.drawing(i) if first else self.randomness.replaying(i)
        managers = [hooks, *draws]
        if not self.shadows.in_place:
            managers.append(self.shadows.swapped_in(self.stage.journal))
        if self.statistics is not None:
            managers.append(self.statistics.collecting(self.stage.journal, record=first))
        if self._watch is not None and first:
            managers.append(self._watch.watching(i, self.stage.journal))
        if self.works[i].terms:
            managers.append(receiving(terms.append))
        if not first:  # after the shadows, which replace frozen parameters too
            saved = self._activations[i].saved
            assert saved is not None, "every micro-batch that is recomputed has it"
            managers += saved.swapped_in(self.stage.journal)
        return together(managers)

    def _behavior(self, i: int, inputs: FlatTree) -> Behavior:
        latest, spec, work = self._latest, inputs.spec, self.works[i]
        if latest is None or latest[1] is not work or (latest[0] is not spec and latest[0] != spec):
            behavior = self.stage.state.behavior(self._flags, (spec, work.signature))
            self._latest = latest = spec, work, behavior
        return latest[2]


def _sizes(outputs: FlatTree, work: Work) -> tuple[int, ...]:
    """Return the number of output leaves on each way; none if there is one way."""
    if not work.leaving:
        return ()
    return tuple(len(tree.leaves) for tree in parted(outputs, 1 + len(work.leaving)))


def in_layers(outside: CodeType | None = None) -> bool:
    """Return True if a layer of a pipeline, or a hook on one, runs the calling code.

    The search ends at the code ``outside``, of a function that no layer calls.
    """
    frame: FrameType | None = sys._getframe(1)  # no flag that an interrupt could leave set
    while frame is not None and frame.f_code is not outside:
        if frame.f_code.co_filename == __file__:
            return True
        frame = frame.f_back
    return False
