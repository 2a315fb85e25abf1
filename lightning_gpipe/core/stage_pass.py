"""One mini-batch's pass through a stage: forward, recompute and backward of each micro-batch.

What comes in are leaves of a small graph of the stage's own, one per micro-batch, and what goes out
is detached from it; the gradient of the output comes from outside, the gradient of the input goes
outside. So the graphs of different stages are never joined, each worker runs backward on its own
thread, and dropping a micro-batch's activations is letting go of its graph. Skip tensors come and
go as further inputs and outputs do.

A pass holds everything that is alive between its forward and its backward. Several may be under way
at once, when a user runs the pipeline twice before one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpipe.core.buffers import Buffers
from lightning_gpipe.core.context import Context
from lightning_gpipe.core.inplace import Watch, memory
from lightning_gpipe.core.pytree import Flat, flatten, unflatten
from lightning_gpipe.core.randomness import Randomness
from lightning_gpipe.core.skip.flight import Table, carrying
from lightning_gpipe.core.skip.layout import cleared, laid_out
from lightning_gpipe.core.stage import Stage
from lightning_gpipe.core.whole import mark_elsewhere

Root = GradientEdge | Tensor
Manager = AbstractContextManager[Any]

_NOTHING = nullcontext()


class _Kept(NamedTuple):
    """What a stage keeps of a micro-batch until its backward."""

    inputs: Flat
    roots: list[Root | None] | None  # where the graphs of the outputs end; None if dropped
    buffers: Buffers | None = None  # as the first forward found them, if it will be recomputed


class StagePass:
    """One mini-batch's pass through a stage; used by one worker at a time.

    Attributes:
        stage: The stage.
        randomness: Where its random numbers come from.
        shadows: What collects the gradients of its parameters.
        statistics: What its batch norms saw, if they defer it.
    """

    def __init__(self, stage: Stage, context: Context, kept: range, randomness: Randomness) -> None:
        self.stage = stage
        self.randomness = randomness
        self.shadows = stage.shadows(context.grad)
        self.statistics = stage.statistics()
        self._context = context
        self._kept = kept
        self._modules = stage.modules
        self._mode = stage.mode
        self._microbatches: dict[int, _Kept] = {}
        self._structure: tuple[Any, int] = (None, -1)  # of the latest inputs, and its number
        self._repeats_plainly: bool | None = None
        self._watched = self.shadows.watched
        self._used: set[int] = set()

    def forward(self, i: int, inputs: Flat) -> Flat:
        """Run the layers on micro-batch ``i``.

        Args:
            i: The micro-batch.
            inputs: What the first layer takes, and then the skip tensors that arrive.

        Returns:
            What the last layer returned, and then the skip tensors that leave; all detached from
            this stage's graph.
        """
        if not self._context.grad:
            return self._run(inputs, self.randomness.drawing(i, again=False), first=True)
        again = i not in self._kept
        numbers = self.randomness.drawing(i, again=again)
        if again:
            running = self.stage.buffers.running(self._circumstances(inputs))
            with running as buffers, self._context.dropping():
                outputs = self._run(inputs, numbers, first=True)
            kept = _Kept(inputs, None, buffers)
            needed = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs.leaves)
        else:
            with self._context.saving():
                outputs = self._run(inputs, numbers, first=True)
            roots = [_root(leaf) for leaf in outputs.leaves]
            kept = _Kept(inputs, roots)
            needed = roots.count(None) < len(roots)
        if needed:
            self._microbatches[i] = kept
            if self._watched:
                self._used |= _leaves_behind(outputs.leaves)
        return self._sent(outputs)

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch ``i`` again, for its graph."""
        if i in self._microbatches:  # else nothing in it needs a gradient
            self._context.variables.copy().run(self._repeat, i)

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs, leaf by leaf.

        Both as in :meth:`forward`, skip tensors included; of the outputs there may be those of the
        skip tensors only. The gradients of the parameters stay in :attr:`shadows`.

        Returns:
            One entry per leaf, or an empty list where nothing needs a gradient.
        """
        if i not in self._microbatches:
            return []  # nothing in it needs a gradient
        (leaves, _), roots, _ = self._microbatches.pop(i)
        assert roots is not None, "recompute comes before backward in every schedule"
        pairs = zip(roots[len(roots) - len(gradients) :], gradients, strict=True)
        given = [(root, g) for root, g in pairs if root is not None and g is not None]
        if given:
            _backward(*zip(*given, strict=True))
        if len(leaves) == 1:
            return [leaves[0].grad]
        first = {id(leaf): k for k, leaf in reversed(list(enumerate(leaves)))}
        return [
            leaf.grad if isinstance(leaf, Tensor) and first[id(leaf)] == k else None
            for k, leaf in enumerate(leaves)
        ]

    def check_unchanged(self) -> None:
        """Raise if a recomputation would not run what forward ran."""
        if all(kept.roots is not None for kept in self._microbatches.values()):
            return
        kept = [each.buffers for each in self._microbatches.values() if each.buffers is not None]
        if self.shadows.edited:
            change = "parameters must not be edited", "an edit, such as an optimizer step"
        elif any(buffers.lost for buffers in kept):
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

    def settle(self) -> None:
        """Take down what forward has shown, once all micro-batches are through.

        Raises:
            RuntimeError: If a layer registered a hook on one of its parameters while it ran.
        """
        self._check_hooks()
        self.shadows.settle()
        if self._watched:
            self.shadows.keep_used(self._used)

    def _check_hooks(self) -> None:
        parameter = self.shadows.hooked
        if parameter is not None:
            raise RuntimeError(
                "hooks on parameters must be registered outside of forward: got one on "
                f"{self.stage.name_of(parameter)}, registered while {self.stage} ran, where it "
                "would see the gradient of each micro-batch instead of the whole. Register it "
                "once, before the first step."
            )

    def release(self) -> None:
        """Let go of everything that was kept for backward."""
        self._microbatches.clear()

    def _sent(self, outputs: Flat) -> Flat:
        """The outputs as leaves of the graphs of the stages they go to, each with its own."""
        if not self.stage.leaving:
            return outputs.detached()
        main = len(outputs.leaves) - len(self.stage.leaving)
        sent = Flat(outputs.leaves[:main]).detached().leaves
        targets = [self.stage.partition.index + 1] * main
        for route, tensor in zip(self.stage.leaving, outputs.leaves[main:], strict=True):
            sent += Flat([tensor]).detached().leaves
            targets.append(route.target)
        where: dict[int | None, set[int]] = {}
        for leaf, target in zip(sent, targets, strict=True):
            where.setdefault(memory(leaf), set()).add(target)
        for leaf in sent:
            if memory(leaf) is not None and len(where[memory(leaf)]) > 1:
                mark_elsewhere(leaf)
        return Flat(sent, outputs.spec)

    def _repeat(self, i: int) -> None:
        inputs, _, buffers = self._microbatches[i]
        assert buffers is not None, "kept for every micro-batch that is recomputed"
        with self._as_in_forward(), self._context.saving(), buffers.lent():
            inputs = inputs.detached()  # without the hooks that layers put on those of forward
            outputs = self._run(inputs, self.randomness.replaying(i), first=False)
        self._microbatches[i] = _Kept(inputs, list(map(_root, outputs.leaves)))

    def _as_in_forward(self) -> Manager:
        """Give the thread and the modules what they had in forward."""
        if self._repeats_plainly is None:  # it is the same for all micro-batches
            self._repeats_plainly = not (
                self._context.lacking() or self._context.modes or self.stage.mode != self._mode
            )
        if self._repeats_plainly:
            return _NOTHING
        stack = ExitStack()
        for each in (
            self._context.entered(),
            self._context.modes.entered(),
            self.stage.in_mode(self._mode),
        ):
            stack.enter_context(each)
        return stack

    def _run(self, inputs: Flat, numbers: Manager | None, *, first: bool) -> Flat:
        stage = self.stage
        watch = stage.edits.watch(
            self._circumstances(inputs), inputs.leaves, grad=self._context.grad
        )
        x, skips = self._laid_out(watch.leaves, inputs.spec)
        around = self._around(numbers, skips, first=first)
        if around:
            with ExitStack() as stack:
                for each in around:
                    stack.enter_context(each)
                x = self._through(x, watch)
        else:
            x = self._through(x, watch)
        watch.close()
        outputs = flatten(x)
        if not (skips or stage.leaving):
            return outputs
        leaving = cleared(skips, stage.leaving)
        for route, tensor in zip(stage.leaving, leaving, strict=True):
            stage.skip_bytes[route.name] = 0 if tensor is None else tensor.nbytes
        return Flat([*outputs.leaves, *leaving], outputs.spec)

    def _around(self, numbers: Manager | None, skips: Table, *, first: bool) -> list[Manager]:
        """What must hold while the layers run, as far as it does not anyway."""
        found = [] if numbers is None else [numbers]
        if not self.shadows.on:
            found.append(self.shadows.cast())
        if self.statistics is not None:
            found.append(self.statistics.collecting(first))
        if self.stage.skips:
            found.append(carrying(skips))
        return found

    def _through(self, x: Any, watch: Watch) -> Any:
        partition = self.stage.partition
        for k, layer in enumerate(partition.layers, start=partition.first):
            x = layer(x)
            watch.after(k, layer)
        return x

    def _laid_out(self, leaves: list[Any], spec: Any) -> tuple[Any, Table]:
        """What the first layer takes, and the skip tensors that layers find on their table."""
        arriving = self.stage.arriving
        if not arriving:
            return unflatten(Flat(leaves, spec)), {}
        main = len(leaves) - len(arriving)
        return unflatten(Flat(leaves[:main], spec)), laid_out(arriving, leaves[main:])

    def _circumstances(self, inputs: Flat) -> int:
        structure, number = self._structure
        if number < 0 or structure is not inputs.spec:
            number = self.stage.circumstances(self._mode, inputs.spec)
            self._structure = inputs.spec, number
        return number


def _root(leaf: Any) -> Root | None:
    """Where backward begins; the tensor itself is for who asked for it to keep."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    # Before torch 2.9 backward cannot begin at the edge of a node that is written in Python.
    written_in_python = isinstance(leaf.grad_fn, torch._C._FunctionBase)
    return leaf if written_in_python else get_gradient_edge(leaf)


def _backward(roots: tuple[Root, ...], gradients: tuple[Tensor, ...]) -> None:
    """What ``torch.autograd.backward`` does once it has looked at what it was given.

    Its look takes as long as backward through a small layer.
    """
    Variable._execution_engine.run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _leaves_behind(outputs: list[Any]) -> set[int]:
    """The ids of the leaves that backward would reach from ``outputs``."""
    waiting = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(waiting)
    found = set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        waiting += new
    return found
