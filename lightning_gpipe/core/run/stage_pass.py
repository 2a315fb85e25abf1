"""One mini-batch's pass through a stage: forward, recompute and backward of each micro-batch.

A stage has a small graph of its own for each micro-batch: the inputs are its leaves, and the
outputs are detached from it. The gradients of the outputs come from other stages, and those of the
inputs go to other stages. So the graphs of different stages are never joined, each worker runs
backward on its own thread, and dropping a micro-batch's activations means freeing its graph. Skip
tensors are further inputs and outputs.

A pass holds everything that is alive between its forward and its backward. Several may exist at
once, if a user runs the pipeline twice before one backward.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_gpipe.core.data import (
    FlatTree,
    Term,
    bytes_of,
    copy_marks,
    mark_aliased,
    memory,
    receiving,
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
    Saved,
    Shadows,
    together,
)
from lightning_gpipe.core.run.asides import Asides
from lightning_gpipe.core.run.captures import Captures
from lightning_gpipe.core.run.participation import Participation
from lightning_gpipe.core.run.roots import (
    Root,
    root_of,
)
from lightning_gpipe.core.run.side_channels import warn_of_attributes
from lightning_gpipe.core.run.stage import Stage
from lightning_gpipe.core.skip import (
    Table,
    in_flight,
    table_of,
    tensors_leaving,
    using_table,
)

_NO_TERMS = tree_flatten([])


class _Kept(NamedTuple):
    """What a stage keeps of a micro-batch until its backward."""

    inputs: FlatTree
    roots: list[Root | None] | None  # where backward of the outputs starts; None if dropped
    # If it will be recomputed: the state from before, and the version counters of the inputs.
    saved: Saved | None = None
    versions: tuple[int, ...] = ()
    terms: int = 0  # the number of the leaves of its loss terms

    @property
    def edited(self) -> bool:
        """Whether an input was edited since forward, although it will be needed again."""
        return self.roots is None and _versions(self.inputs) != self.versions


class StagePass:
    """One mini-batch's pass through a stage; used by one worker at a time.

    Args:
        stage: The stage.
        context: The caller's thread-local state in forward.
        recomputed: The micro-batches whose activations are dropped.
        randomness: Where random numbers come from.
        shadows: What collects the gradients of the stage's parameters.
        participation: Where to record which parameters take part.
        watch: Notices layers that mix rows; None in most mini-batches.
        terms: Whether to collect loss terms.

    Attributes:
        stage, randomness, shadows, terms: As given.
        statistics: The statistics of the stage's batch norms, if they are deferred.
        asides: Watches for gradients that do not come through the outputs.
    """

    def __init__(
        self,
        stage: Stage,
        context: Context,
        recomputed: frozenset[int],
        randomness: Randomness,
        shadows: Shadows,
        participation: Participation,
        watch: RowWatch | None = None,
        *,
        terms: bool = False,
    ) -> None:
        self.stage = stage
        self.randomness = randomness
        self.shadows = shadows
        self.terms = terms
        self.statistics = stage.statistics()
        self._context = context
        self._recomputed = recomputed
        self._watch = watch
        # Whether a first forward needs no context manager but that of the shadows.
        self._bare = not (randomness.redirected or self.statistics or stage.skips or watch or terms)
        self._modules = stage.modules
        self._flags = stage.training_flags
        self._microbatches: dict[int, _Kept] = {}
        self._captures = Captures(participation)
        self.asides = Asides()
        self._terms: dict[int, FlatTree] = {}
        self._latest: tuple[Any, Behavior] | None = None  # for the latest structure of inputs
        self._differs: bool | None = None  # whether the state in backward differs from forward's

    def forward(self, i: int, inputs: FlatTree) -> FlatTree:
        """Run the layers on micro-batch ``i``.

        Args:
            i: The micro-batch.
            inputs: The input of the first layer, followed by the skip tensors that arrive.

        Returns:
            The output of the last layer, followed by the skip tensors that leave; all detached from
            this stage's graph.
        """
        if not self._context.grad:
            outputs, self._terms[i] = self._run(i, inputs, first=True)
            return outputs
        if i in self._recomputed:
            self.randomness.save(i)
            behavior = self._behavior(inputs)
            before = self.stage.state.before(behavior)
            with self._context.dropping():
                outputs, terms = self._run(i, inputs, first=True)
            saved = self.stage.state.after(behavior, before)
            if self.stage.last:
                outputs = _apart(outputs, inputs)
            leaves = [*outputs.leaves, *terms.leaves]
            kept = _Kept(inputs, None, saved, _versions(inputs), len(terms.leaves))
            needed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        else:
            with self._context.saving():
                outputs, terms = self._run(i, inputs, first=True)
            leaves = [*outputs.leaves, *terms.leaves]
            roots = [root_of(leaf) for leaf in leaves]
            kept = _Kept(inputs, roots)
            needed = bool([root for root in roots if root is not None])
        if needed:
            self._microbatches[i] = kept
            self._captures.record(self._behavior(inputs), inputs.leaves, leaves)
            self.asides.watch(inputs.leaves, partial(_input_described, self.stage))
        if self.terms:
            self._terms[i] = terms.detached()
        return self._sent(outputs)

    def take_terms(self, i: int) -> FlatTree:
        """The loss terms of micro-batch ``i``, detached like its outputs; no longer held here."""
        return self._terms.pop(i)

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch ``i`` again, to build its graph."""
        if i in self._microbatches:  # else nothing in it requires a gradient
            self._context.variables.copy().run(self._repeat, i)

    def backward(self, i: int, gradients: FlatTree) -> FlatTree:
        """Compute the gradients of the inputs from those of the outputs, leaf by leaf.

        Both are ordered as in :meth:`forward`, skip tensors included; ``gradients`` end with those
        of the loss terms, and may have no others but those of the skip tensors. The gradients of
        the parameters stay in :attr:`shadows`.

        Returns:
            One leaf per input, or none if nothing requires a gradient.
        """
        if i not in self._microbatches:
            return FlatTree([])  # nothing in it requires a gradient
        kept = self._microbatches.pop(i)
        leaves, roots = kept.inputs.leaves, kept.roots
        assert roots is not None, "recompute comes before backward in every schedule"
        with self.randomness.drawing_in_backward(i):
            self._captures.run_backward(
                roots[len(roots) - len(gradients.leaves) :], gradients.leaves
            )
        return FlatTree([_taken(leaf) for leaf in leaves])  # of equal leaves, the first has it

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The sums of the gradients of parameters and captured leaves, no longer held here."""
        return [*self.shadows.take_gradients(), *self._captures.take_gradients()]

    def check_unchanged(self) -> None:
        """Raise if a recomputation would not compute what forward computed."""
        if all(kept.roots is not None for kept in self._microbatches.values()):
            return
        self._check_inputs()
        kept = [each.saved for each in self._microbatches.values() if each.saved is not None]
        if self.shadows.edited:
            change = "parameters must not be edited", "an edit, such as an optimizer step"
        elif any(saved.buffers.lost for saved in kept):
            change = "buffers must not be edited", "an edit"
        elif self.stage.modules_now() != self._modules:
            change = "modules must not be added, removed or replaced", "other modules"
        else:
            return
        rule, found = change
        raise RuntimeError(
            f"{rule} between a forward and its backward: got {found} in {self.stage}, and its "
            "forward is yet to be recomputed. Change the model after backward."
        )

    def _check_inputs(self) -> None:
        i = next((i for i, kept in self._microbatches.items() if kept.edited), None)
        if i is not None:
            raise RuntimeError(
                f"the input of {self.stage} must not be edited between a forward and its backward: "
                f"got an edit in place of micro-batch {i}, and its forward is yet to be "
                "recomputed. Edit a copy, write the next batch after backward, or write "
                "activation_checkpointing='never'."
            )

    def finish_forward(self) -> None:
        """Update running statistics, and record the version counters of the parameters.

        Raises:
            RuntimeError: If a layer registered a hook on one of its parameters while it ran, or
                edited one in a way that cannot be honoured.
        """
        self._check_hooks()
        self._check_edits()
        for parameter in self.shadows.parameters:
            description = partial(_parameter_described, self.stage, parameter)
            self.asides.watch([self.shadows.shadow_of(parameter)], description)
        if self._watch is not None:
            self._watch.close()
        self.shadows.record_versions()
        if self.statistics is not None:
            self.statistics.commit()

    def _check_hooks(self) -> None:
        parameter = self.shadows.hooked
        if parameter is not None:
            raise RuntimeError(
                "hooks on parameters must be registered outside of forward: got one on "
                f"{self.stage.name_of(parameter)}, registered while {self.stage} ran, where it "
                "would see the gradient of each micro-batch instead of the whole. Register it "
                "once, before the first step."
            )

    def _check_edits(self) -> None:
        replaced = self.shadows.replaced
        if replaced is not None:
            raise RuntimeError(
                "the data of a parameter that is trained must not be replaced in forward: got "
                f"other data of {self.stage.name_of(replaced)}. Write weight.data.copy_(value) "
                "instead of weight.data = value."
            )
        moved = self.shadows.moved
        if not moved:
            return
        known = set(map(id, self.stage.edited_parameters))
        unknown = next((each for each in moved if id(each) not in known), None)
        if unknown is not None:
            raise RuntimeError(
                f"frozen parameters must be edited in every forward or in none: {self.stage} "
                f"edited {self.stage.name_of(unknown)} for the first time after an earlier run "
                "that did not, and the value before is needed for recomputation. Make it a buffer, "
                "or write activation_checkpointing='never'."
            )

    def release(self) -> Asides:
        """Free everything that was kept for backward, and return what watches its leaves."""
        self._microbatches.clear()
        return self.asides

    def _sent(self, outputs: FlatTree) -> FlatTree:
        """The outputs, detached: leaves for the graphs of the stages that they are sent to."""
        if not self.stage.leaving:
            return outputs.detached()
        main = len(outputs.leaves) - len(self.stage.leaving)
        sent = FlatTree(outputs.leaves[:main]).detached().leaves
        targets = [self.stage.partition.index + 1] * main
        for route, tensor in zip(self.stage.leaving, outputs.leaves[main:], strict=True):
            sent += FlatTree([tensor]).detached().leaves
            targets.append(route.target)
        targets_of: dict[int | None, set[int]] = {}
        for leaf, target in zip(sent, targets, strict=True):
            targets_of.setdefault(memory(leaf), set()).add(target)
        for leaf in sent:
            if memory(leaf) is not None and len(targets_of[memory(leaf)]) > 1:
                mark_aliased(leaf)
        return FlatTree(sent, outputs.spec)

    def _repeat(self, i: int) -> None:
        RECOMPUTING.set(True)  # in the copied context variables
        inputs = self._microbatches[i].inputs
        with together([*self._as_in_forward(), self._context.saving()]):
            inputs = inputs.detached()  # without hooks that layers registered on them in forward
            outputs, terms = self._run(i, inputs, first=False)
        if len(terms.leaves) != self._microbatches[i].terms:
            raise RuntimeError(
                "a layer must hand out the same loss terms when its forward is recomputed: got "
                f"others in {self.stage}. Do not let them depend on what forward changes."
            )
        leaves = [*outputs.leaves, *terms.leaves]
        self.asides.watch(inputs.leaves, partial(_input_described, self.stage))
        self._microbatches[i] = _Kept(inputs, [root_of(leaf) for leaf in leaves])

    def _as_in_forward(self) -> list[Manager]:
        """The context managers that restore the thread's and the modules' state of forward."""
        context = self._context
        if self._differs is None:  # the same for all micro-batches
            other_flags = self.stage.training_flags != self._flags
            self._differs = bool(context.missing() or context.modes or other_flags)
        if not self._differs:
            return []
        return [context.entered(), context.modes.entered(), self.stage.training_as(self._flags)]

    def _run(self, i: int, inputs: FlatTree, *, first: bool) -> tuple[FlatTree, FlatTree]:
        """Run the layers; returns their outputs, those that leave by skip included, and terms."""
        stage = self.stage
        # The first stage's inputs are the caller's, which a layer must not edit.
        marked = not self._context.grad and stage.partition.index > 0
        guard = MutationGuard(self._behavior(inputs), inputs.leaves, marked=marked)
        x, skips = self._arrived(guard.leaves, inputs.spec)
        terms: list[Term] = []
        bare = first and self._bare and self.shadows.in_place
        with NOTHING if bare else self._around(i, skips, terms, first=first):
            for k, layer in enumerate(stage.partition.layers, start=stage.partition.first):
                x = layer(x)
                guard.after(k, layer)
        guard.close()
        outputs = tree_flatten(x)
        if guard.first:
            warn_of_attributes(stage, outputs.leaves)
        skips = skips if stage.skips else in_flight()
        if not (skips or stage.leaving):
            return outputs, tree_flatten(terms) if terms else _NO_TERMS
        leaving = tensors_leaving(skips, stage.leaving)
        for route, tensor in zip(stage.leaving, leaving, strict=True):
            stage.skip_bytes[route.name] = 0 if tensor is None else bytes_of(tensor)
        outputs = FlatTree([*outputs.leaves, *leaving], outputs.spec)
        return outputs, tree_flatten(terms) if terms else _NO_TERMS

    def _around(self, i: int, skips: Table, terms: list[Term], *, first: bool) -> Manager:
        """The context managers in which the layers run, without those that are not needed."""
        found = self.randomness.drawing(i) if first else self.randomness.replaying(i)
        if not self.shadows.in_place:
            found.append(self.shadows.swapped_in(self.stage.journal))
        if self.statistics is not None:
            found.append(self.statistics.collecting(self.stage.journal, record=first))
        if self._watch is not None and first:
            found.append(self._watch.watching(i, self.stage.journal))
        if self.stage.skips:
            found.append(using_table(skips))
        if self.terms:
            found.append(receiving(terms.append))
        if not first:  # after the shadows, which replace frozen parameters too
            saved = self._microbatches[i].saved
            assert saved is not None, "kept for every micro-batch that is recomputed"
            found += saved.swapped_in(self.stage.journal)
        return together(found)

    def _arrived(self, leaves: list[Any], spec: Any) -> tuple[Any, Table]:
        """The input of the first layer, and the table with the skip tensors that arrived."""
        arriving = self.stage.arriving
        if not arriving:
            return tree_unflatten(FlatTree(leaves, spec)), {}
        main = len(leaves) - len(arriving)
        return tree_unflatten(FlatTree(leaves[:main], spec)), table_of(arriving, leaves[main:])

    def _behavior(self, inputs: FlatTree) -> Behavior:
        if self._latest is None or self._latest[0] is not inputs.spec:
            self._latest = inputs.spec, self.stage.behavior(self._flags, inputs.spec)
        return self._latest[1]


def _taken(leaf: Any) -> Tensor | None:
    """The gradient of a leaf, which no longer holds it."""
    if not isinstance(leaf, Tensor) or leaf.grad is None:
        return None
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _input_described(stage: Stage) -> str:
    return f"the input of {stage}"


def _parameter_described(stage: Stage, parameter: nn.Parameter) -> str:
    return f"{stage.name_of(parameter)} in {stage}"


def _versions(inputs: FlatTree) -> tuple[int, ...]:
    """The version counters of the tensors among the leaves; inference tensors have none."""
    return tuple(
        leaf._version
        for leaf in inputs.leaves
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    )


def _apart(outputs: FlatTree, inputs: FlatTree) -> FlatTree:
    """The outputs without the memory of the inputs, for the caller, who may edit them in place."""
    kept = {memory(leaf) for leaf in inputs.leaves} - {None}
    shared = [memory(leaf) in kept for leaf in outputs.leaves]
    if not any(shared):
        return outputs
    leaves = [
        copy_marks(leaf, leaf.clone()) if copied else leaf
        for leaf, copied in zip(outputs.leaves, shared, strict=True)
    ]
    return FlatTree(leaves, outputs.spec)


def in_layers() -> bool:
    """Whether the caller is run by a layer of a pipeline, or by a hook on one."""
    frame = sys._getframe(1)  # no flag that an interrupt could leave set
    while frame.f_back is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame.f_code.co_filename == __file__
