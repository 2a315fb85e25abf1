"""One partition at work: forward, recompute and backward of one micro-batch.

A stage knows nothing of other stages. What comes in are leaves of a small graph of its own, one per
micro-batch, and what goes out is detached from it; the gradient of the output comes from outside,
the gradient of the input goes outside. So the graphs of different stages are never joined, each
worker runs backward on its own thread, and dropping a micro-batch's activations is letting go of
its graph.

A :class:`Stage` lives as long as the pipeline. A :class:`StagePass` is one mini-batch's pass
through it and holds everything that is alive between its forward and its backward; several may be
under way at once, when a user runs the pipeline twice before one backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.batchnorm import DeferredStatistics
from lightning_gpipe.core.buffers import Buffers, StageBuffers
from lightning_gpipe.core.context import Context
from lightning_gpipe.core.inplace import Edits
from lightning_gpipe.core.partition import Partition
from lightning_gpipe.core.pytree import Flat, flatten, unflatten
from lightning_gpipe.core.randomness import Randomness
from lightning_gpipe.core.shadow import Place, Shadows

TrainingMode = tuple[bool, ...]


class Stage:
    """A partition and the device on which it works.

    Attributes:
        partition: The layers.
        device: Where their parameters are.
        followed: The places of parameters that live on another device.
        modules: The layers and all modules within them.
        buffers: Their buffers.
        edits: Which inputs they edit.
    """

    def __init__(self, partition: Partition, device: torch.device, *, deferred_batch_norm: bool):
        self.partition = partition
        self.device = device
        self.followed: frozenset[Place] = frozenset()
        self._deferred_batch_norm = deferred_batch_norm
        self._survey(self.modules_now())

    def __str__(self) -> str:
        return f"stage {self.partition.index} ({self.partition}, {self.device})"

    def refresh(self) -> None:
        """Take the layers as they are now: modules within them may come and go between steps.

        Raises:
            RuntimeError: If a parameter was moved from the stage's device.
        """
        modules = self.modules_now()
        if modules != self.modules:
            self._survey(modules)
        self._check_placement()

    def begin(self, context: Context, kept: range, randomness: Randomness) -> StagePass:
        """Let a mini-batch pass through; ``kept`` are the micro-batches not recomputed."""
        return StagePass(self, context, kept, randomness)

    def modules_now(self) -> tuple[nn.Module, ...]:
        """The layers and all modules within them, each once; written for speed."""
        found: dict[nn.Module, None] = {}
        waiting = list(self.partition.layers)[::-1]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found[module] = None
                waiting += [child for child in module._modules.values() if child is not None][::-1]
        return tuple(found)

    def shadows(self, grad: bool) -> Shadows:
        """Shadows for one mini-batch."""
        return Shadows(self.modules, grad=grad, device=self.device, followed=self.followed)

    def statistics(self) -> DeferredStatistics | None:
        """Where batch norms put what they see of one mini-batch, if they defer it."""
        return DeferredStatistics.of(self.modules) if self._deferred_batch_norm else None

    # Whether the stage draws random numbers: see Note [Drawing from a private stream].

    @property
    def draws(self) -> bool | None:
        """Whether the stage draws random numbers in its present training mode, where known."""
        return self._draws.get(self.mode)

    @draws.setter
    def draws(self, draws: bool | None) -> None:
        self._draws[self.mode] = draws

    # A recomputation runs as the forward did, whatever .train() or .eval() was called since.

    @property
    def mode(self) -> TrainingMode:
        """Which of the modules are in training mode."""
        return tuple(module.training for module in self.modules)

    @contextmanager
    def in_mode(self, mode: TrainingMode) -> Iterator[None]:
        """Put the modules into ``mode`` for the duration of a ``with`` block."""
        now = self.mode
        if now == mode:
            yield
            return
        self._set_mode(mode)
        try:
            yield
        finally:
            self._set_mode(now)

    def _set_mode(self, mode: TrainingMode) -> None:
        for module, training in zip(self.modules, mode, strict=True):
            module.training = training

    def name_of(self, parameter: nn.Parameter) -> str:
        """Where in the layers a parameter is, such as ``layer 3.linear.weight``."""
        for k, layer in enumerate(self.partition.layers, start=self.partition.first):
            for name, other in layer.named_parameters():
                if other is parameter:
                    return f"layer {k}.{name}"
        return "a parameter"

    def _survey(self, modules: tuple[nn.Module, ...]) -> None:
        """Start with these modules, of which nothing is known yet."""
        self.modules = modules
        self.buffers = StageBuffers(modules, deferred=self._deferred_batch_norm)
        self.edits = Edits()
        self._draws: dict[TrainingMode, bool | None] = {}

    def _check_placement(self) -> None:
        for module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.device == self.device:
                    continue
                if (module, name) not in self.followed:
                    raise RuntimeError(
                        f"the parameters of {self} must stay on {self.device}: found {name!r} of "
                        f"{type(module).__name__} on {parameter.device}. Something moved or "
                        "replaced it after the pipeline was set up; the pipeline places its layers "
                        "itself, so remove calls such as .to() or .cuda() on them."
                    )


class _Kept(NamedTuple):
    """What a stage keeps of a micro-batch until its backward."""

    inputs: Flat
    outputs: list[Any] | None  # with their graph; None when dropped
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
        self._watched = self.shadows.watched
        self._used: set[int] = set()

    def forward(self, i: int, inputs: Flat) -> Flat:
        """Run the layers on micro-batch ``i``; the result is detached from this stage's graph."""
        numbers = self.randomness.drawing(i)
        if not self._context.grad:
            return flatten(self._run(inputs, numbers, first=True))
        if i in self._kept:
            with self._context.saving():
                flat = flatten(self._run(inputs, numbers, first=True))
            kept = _Kept(inputs, flat.leaves)
        else:
            running = self.stage.buffers.running((self._mode, inputs.spec))
            with running as buffers, self._context.dropping():
                flat = flatten(self._run(inputs, numbers, first=True))
            kept = _Kept(inputs, None, buffers)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flat.leaves):
            self._microbatches[i] = kept
            if self._watched:
                self._used |= _leaves_behind(flat.leaves)
        return flat.detached()

    def recompute(self, i: int) -> None:
        """Run the forward of micro-batch ``i`` again, for its graph."""
        if i in self._microbatches:  # else nothing in it needs a gradient
            self._context.variables.copy().run(self._repeat, i)

    def backward(self, i: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs, leaf by leaf.

        The gradients of the parameters stay in :attr:`shadows`.

        Returns:
            One entry per leaf, or an empty list where nothing needs a gradient.
        """
        if i not in self._microbatches:
            return []  # nothing in it needs a gradient
        (leaves, _), outputs, _ = self._microbatches.pop(i)
        assert outputs is not None, "recompute comes before backward in every schedule"
        roots = {
            k: gradient
            for k, gradient in enumerate(gradients)
            if gradient is not None and outputs[k].requires_grad
        }
        if roots:
            torch.autograd.backward([outputs[k] for k in roots], list(roots.values()))
        first = {id(leaf): k for k, leaf in reversed(list(enumerate(leaves)))}
        return [
            leaf.grad if isinstance(leaf, Tensor) and first[id(leaf)] == k else None
            for k, leaf in enumerate(leaves)
        ]

    def check_unchanged(self) -> None:
        """Raise if a recomputation would not run what forward ran."""
        if all(kept.outputs is not None for kept in self._microbatches.values()):
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

    def _repeat(self, i: int) -> None:
        inputs, _, buffers = self._microbatches[i]
        assert buffers is not None, "kept for every micro-batch that is recomputed"
        with (
            self._context.entered(),
            self._context.modes.entered(),
            self._context.saving(),
            self.stage.in_mode(self._mode),
            buffers.lent(),
        ):
            inputs = inputs.detached()  # without the hooks that layers put on those of forward
            outputs = self._run(inputs, self.randomness.replaying(i), first=False)
        self._microbatches[i] = _Kept(inputs, flatten(outputs)[0])

    def _run(self, inputs: Flat, numbers: Any, *, first: bool) -> Any:
        partition, statistics = self.stage.partition, self.statistics
        collecting = nullcontext() if statistics is None else statistics.collecting(first)
        watch = self.stage.edits.watch(
            (self._mode, inputs.spec), inputs.leaves, grad=self._context.grad
        )
        x = unflatten(Flat(watch.leaves, inputs.spec))
        with numbers, self.shadows.cast(), collecting:
            for k, layer in enumerate(partition.layers, start=partition.first):
                x = layer(x)
                watch.after(k, layer)
        watch.close()
        return x


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
