"""Verifies that a loss for each micro-batch makes the loss of the batch.

A sum over rows, a mean over tokens of which some are padding, or a loss that compares rows with one
another raise no error: they train something else than the mean weighted by rows. So a step runs on
one batch both ways, with the layers as by fill-drain, and for each micro-batch, and its loss and
the gradients of all parameters are compared. The layers are verified in the first of these runs,
and reported apart: any other difference is due to the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import change_tensors
from lightning_gpipe.core.faithful import (
    Attributes,
    Changes,
    ForeignGenerator,
    RandomState,
    patched,
)
from lightning_gpipe.core.layout import holders, is_generator
from lightning_gpipe.core.pipeline import GPipe, StepSchedule
from lightning_gpipe.core.run import loss_and_weight
from lightning_gpipe.core.verify.compare import perturbed
from lightning_gpipe.core.verify.difference import DifferenceSearch
from lightning_gpipe.core.verify.isolation import (
    by_rows,
    exclusive,
    in_chunks,
    isolated,
    of_micro_batches,
)
from lightning_gpipe.core.verify.named_values import GRADIENTS, LOSS, kept_values, on_cpu
from lightning_gpipe.core.verify.parity import LossParity, Parity, StepParity
from lightning_gpipe.core.verify.runs import Run, gradients_of, sample_of, tolerance_for
from lightning_gpipe.core.verify.verification import FirstBatchVerifier, compare_everywhere

_DRAWS = "it draws random numbers, others for each micro-batch"


def verify_step(
    pipeline: GPipe,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    schedule: StepSchedule = "1f1b",
    around: nn.Module | None = None,
    scale: float | Tensor = 1.0,
    tolerance: float | None = None,
) -> StepParity | None:
    """Compare a step on a batch with the same step for each micro-batch, before training.

    Example::

        parity = verify_step(model, step, (x, y), schedule="1f1b", around=head)
        parity.check()  # raises RuntimeError if the loss is no mean over rows
        outcome = model.by_micro_batch(step, (x, y), schedule="1f1b", around=head)

    Buffers, attributes of modules, generators, ``.grad`` and the pipeline are the same afterwards.
    Other changes by the step are not undone: it runs for the whole batch and for each
    micro-batch, and up to two more times for the whole batch if there is a difference. That needs
    the memory of a forward and backward of the whole batch.

    Args:
        pipeline: The pipeline.
        step: As for :meth:`~lightning_gpipe.GPipe.by_micro_batch`.
        batch: A batch.
        schedule: As for :meth:`~lightning_gpipe.GPipe.by_micro_batch`.
        around: A module with all that the step uses besides the model; None if there is nothing.
        scale: The factor of gradients while they are computed.
        tolerance: As for :func:`~lightning_gpipe.verify`.

    Returns:
        The results for the layers and for the loss; None if the step skips the batch.
    """
    return _verified(StepRuns(pipeline, step, batch, around, scale), schedule, tolerance)


def verify_step_sample(
    pipeline: GPipe,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    schedule: StepSchedule,
    around: nn.Module | None = None,
    scale: float | Tensor = 1.0,
) -> StepParity | None:
    """Verify a step on a few rows of a batch; return None unless there surely is a fault."""
    if pipeline.only.chunks == 1:
        return None
    parity: StepParity | None = None
    with in_chunks([pipeline.only], 2), suppress(Exception):
        few = sample_of(batch, pipeline.only.microbatching)
        runs = StepRuns(pipeline, step, few, around, scale, sampled=True, layers=False)
        parity = _verified(runs, schedule)
        if parity is not None and parity.loss.surely_faulty:
            return _verified(replace(runs, layers=True), schedule)
    if parity is not None:
        parity.loss.warn_of_kept()
    return None


def _verified(
    runs: StepRuns, schedule: StepSchedule, tolerance: float | None = None
) -> StepParity | None:
    pipeline = runs.pipeline
    parities: list[Parity] = []
    with exclusive([pipeline.only]), by_rows(runs.modules, sampled=runs.sampled):
        pieces = runs.by_micro_batch(schedule)
        if not runs.losses:
            return None
        whole = runs.whole(parities=parities if runs.layers else None)
        tolerance = tolerance_for(tolerance, whole, runs.parameters.values(), runs.devices)
        value = whole.values[LOSS][""]
        assert value is not None, "the step does not skip the batch"
        loss = float(value)
        summed = abs(sum(runs.losses) - loss) <= tolerance * abs(loss)
        # If the loss is a sum, that is the cause.
        search = DifferenceSearch(tolerance, reason=None if summed else runs.reason())
        comparison = compare_everywhere(pipeline.only, search, whole, pieces, runs.whole)
    loss_parity = LossParity(
        len(runs.losses),
        *comparison,
        summed=summed,
        weighted=runs.weighted,
        changed=tuple(runs.changed),
    )
    return StepParity(tuple(parities), loss_parity)


@dataclass(eq=False)
class StepRuns:
    """Runs of one step on one batch, each from the same state.

    ``losses`` has the loss of each micro-batch, none if the step skips the batch, and ``weighted``
    is True if the step has returned its weight. ``changed`` names what it changes around the
    layers: attributes and generators of ``around`` itself, not of metrics in it, and all buffers.
    """

    pipeline: GPipe
    step: Callable[[Any], Any]
    batch: Any
    around: nn.Module | None
    scale: float | Tensor
    sampled: bool = False  # of a few rows
    layers: bool = True  # to be verified, too; without, they run on the whole batch at once

    def __post_init__(self) -> None:
        models = nn.ModuleList(x for x in (self.around, self.pipeline) if x is not None)
        # Without the index of a model.
        self._names = [(name.partition(".")[2], each) for name, each in models.named_modules()]
        self.modules = list(models.modules())
        self.parameters: dict[str, nn.Parameter] = {}
        for path, parameter in models.named_parameters():
            _, _, name = path.partition(".")
            if parameter.requires_grad:
                unique = f"{name} of the pipeline" if name in self.parameters else name
                self.parameters[unique] = parameter
        self.devices = self.pipeline.layout.devices
        self._layers = {x for stage in self.pipeline.stages for x in stage.modules}
        self.losses: list[float] = []
        self.weighted = False
        self.changed: list[str] = []
        self._even = False  # whether all micro-batches have equally many rows
        self._drew = False

    def by_micro_batch(self, schedule: StepSchedule) -> Run:
        unread = patched([(Attributes(self.pipeline.only), "reads_losses", False)])
        with isolated(self.modules, [self.pipeline.only]), unread:
            changes = Changes(self._layers)
            outcome = self.pipeline.by_micro_batch(
                self.step, self._copy(), schedule=schedule, around=self.around, scale=self.scale
            )
            losses_and_weights = list(map(loss_and_weight, outcome.results))
            self.losses = [float(loss) for loss, _ in losses_and_weights if loss is not None]
            self.weighted = losses_and_weights[0][1] is not None
            self._even = outcome.rows is not None and len(set(outcome.rows)) == 1
            return self._run(outcome.loss, changes)

    def whole(self, perturb: bool = False, *, parities: list[Parity] | None = None) -> Run:
        """Run the step on the whole batch; verify the layers for a list of ``parities``."""
        with isolated(self.modules, [self.pipeline.only]), ExitStack() as stack:
            if not self.layers:
                stack.enter_context(in_chunks([self.pipeline.only], 1))
            if parities is not None:
                verifier = FirstBatchVerifier(self.pipeline.piped_modules, parities.append)
                stack.callback(verifier.remove)
            if perturb:
                stack.enter_context(perturbed(self.pipeline))
            before = RandomState.capture(self.devices)
            changes, changed = Changes(self._layers), self._changes()
            loss, _ = loss_and_weight(self.step(self._copy()))
            self.changed = changed()
            run = self._run(loss, changes)
            self._drew = bool(before.differences())
            return run

    def reason(self) -> str | None:
        """Return why a step for each micro-batch may differ, if that is known.

        Verified layers run in micro-batches both ways, of the same rows if these are equally many.
        """
        same = self._layers if self._even and self.layers else ()
        reasons = [
            f"{name!r} is a {type(module).__name__}, {way}"
            for name, module in self._names
            if module not in same and (way := of_micro_batches(module))
        ]
        return "; ".join([*reasons[:1], *[_DRAWS] * self._drew]) or None

    def _changes(self) -> Callable[[], list[str]]:
        """Return a function that returns what has changed around the layers since, by name."""
        names = {module: f"{name}." if name else "" for name, module in self._names}
        outside = [module for module in names if module not in self._layers]
        owners = () if self.around is None else (self.around,)
        changes = Changes(owners, buffers_of=outside)
        held = [
            (holder.slot(name), ForeignGenerator.of(value))
            for holder in holders(owners)
            for name, value in holder.held.items()
            if is_generator(value)
        ]
        generators = RandomState.of([generator for _, generator in held])

        def changed() -> list[str]:
            drawn = {held[k][0] for k, _ in generators.changes()}
            slots = changes.slots | drawn
            return sorted({names[module] + name for module, name in slots})

        return changed

    def _copy(self) -> Any:
        return change_tensors(self.batch, torch.clone)

    def _run(self, loss: Tensor | None, changes: Changes) -> Run:
        """Return the loss, and the gradients of all parameters, which are not accumulated."""
        if loss is None:
            return Run({LOSS: {}, GRADIENTS: {}})
        seed = torch.as_tensor(self.scale).to(loss)
        roots = [loss] if loss.requires_grad else []
        sources = list(self.parameters.values())
        seeds = [seed.expand_as(loss)]
        gradients = gradients_of(roots, sources, seeds, self.devices, thin=self.sampled)
        scale = float(seed)
        scaled = [None if gradient is None else gradient / scale for gradient in gradients]
        values = dict(zip(self.parameters, scaled, strict=True))
        layers = [(name, module) for name, module in self._names if module in self._layers]
        kept = kept_values(changes, layers)
        return Run({LOSS: {"": on_cpu(loss)}, GRADIENTS: values}, kept=kept)
