"""Runs of one step on one batch, on all of it and for each micro-batch, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import map_tensors
from lightning_gpipe.core.faithful import Context, Journal, preserved
from lightning_gpipe.core.pipeline import GPipe, Outcome
from lightning_gpipe.core.plan import ByMicroBatch
from lightning_gpipe.core.profile import change_tensors
from lightning_gpipe.core.run import loss_and_weight
from lightning_gpipe.core.verify.compare import tolerance_of
from lightning_gpipe.core.verify.difference import sees_the_batch
from lightning_gpipe.core.verify.first_batch import EachVerifiedOnce
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.preserved import without_dropout
from lightning_gpipe.core.verify.rounding import perturbing
from lightning_gpipe.core.verify.runs import Generators, without_autocast
from lightning_gpipe.core.verify.step_parity import GRADIENTS, KINDS, LOSS
from lightning_gpipe.core.verify.values import Values, on_cpu

_DRAWS = "it draws random numbers, others for each micro-batch"


class StepRun(NamedTuple):
    """What a step came to.

    Attributes:
        values: The loss, and the gradients of parameters by their names.
        losses: The loss of each micro-batch; none if the step skips the batch.
        even: Whether all have equally many rows.
        weighted: Whether it said their weights.
        drew: Whether random numbers were drawn.
    """

    values: Mapping[str, Values]
    losses: list[float]
    even: bool
    weighted: bool
    drew: bool


class StepRuns:
    """Runs of one step on one batch, each from the same state."""

    def __init__(
        self,
        pipeline: GPipe,
        step: Callable[[Any], Any],
        batch: Any,
        schedule: ByMicroBatch,
        around: nn.Module | None,
        scale: float | Tensor,
    ) -> None:
        self._pipeline = pipeline
        self._step = step
        self._batch = batch
        self._options: dict[str, Any] = {"schedule": schedule, "around": around, "scale": scale}
        self._scale = scale
        models = [pipeline] if around is None else [around, pipeline]
        self._modules = list(dict.fromkeys(chain.from_iterable(m.modules() for m in models)))
        self._named = list(chain.from_iterable(m.named_modules() for m in models))
        self._parameters = _named_parameters(models)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """A ``with`` block for runs."""
        with without_dropout(self._modules, Journal()), self._pipeline.engine.unchanged():
            yield

    def whole(self, *, layers: list[Parity] | None = None, perturbed: bool = False) -> StepRun:
        """Run the step on the whole batch.

        Args:
            layers: Where to put what is found about the layers; None not to verify them.
            perturbed: Whether to add rounding errors to what the layers return.
        """
        with self._preserved() as generators, ExitStack() as stack:
            if layers is not None:
                stack.callback(EachVerifiedOnce(self._pipeline.taken, layers.append).remove)
            for layer in self._pipeline if perturbed else ():
                hook = partial(_changed, perturbing())
                stack.callback(layer.register_forward_hook(hook).remove)
            result = self._step(self._copy())
            loss, _ = loss_and_weight(result)
            return self._ran(Outcome(loss, [map_tensors(Tensor.detach, result)]), generators)

    def by_micro_batch(self) -> StepRun:
        """Run the step for each micro-batch."""
        with self._preserved() as generators:
            outcome = self._pipeline.by_micro_batch(self._step, self._copy(), **self._options)
            return self._ran(outcome, generators)

    def tolerance_for(self, ran: StepRun) -> float:
        """The largest relative deviation that may be due to rounding."""
        devices = self._pipeline.layout.devices
        casts = {each.dtype for each in Context.capture(devices).autocast if each.enabled}
        found = chain(self._parameters.values(), ran.values[LOSS].values())
        dtypes = {x.dtype for x in found if x is not None}
        return tolerance_of(casts | dtypes, on_cuda=any(d.type == "cuda" for d in devices))

    def reason(self, whole: StepRun, pieces: StepRun) -> str | None:
        """Why a step for each micro-batch may differ, if that is known.

        The layers run in micro-batches in both, of the same rows if these are equally many.
        """
        stages = self._pipeline.stages if pieces.even else ()
        same = {module for stage in stages for module in stage.modules}
        reasons = [
            f"{name!r} is a {type(module).__name__}, which normalises by micro-batch"
            for name, module in self._named
            if sees_the_batch(module) and module not in same
        ]
        return "; ".join([*reasons[:1], *[_DRAWS] * whole.drew]) or None

    def _copy(self) -> Any:
        """The batch, which the step may edit."""
        return change_tensors(self._batch, torch.clone)

    @contextmanager
    def _preserved(self) -> Iterator[Generators]:
        devices = self._pipeline.layout.devices
        with preserved(self._modules, devices):
            yield Generators(devices)

    def _ran(self, outcome: Outcome, generators: Generators) -> StepRun:
        values: dict[str, Values] = {kind: {} for kind in KINDS}
        if outcome.loss is not None:
            values = {LOSS: {"": on_cpu(outcome.loss)}, GRADIENTS: self._gradients(outcome.loss)}
        returned = list(map(loss_and_weight, outcome.results))
        return StepRun(
            values,
            losses=[float(loss) for loss, _ in returned if loss is not None],
            even=outcome.rows is not None and len(set(outcome.rows)) == 1,
            weighted=returned[0][1] is not None,
            drew=generators.moved,
        )

    def _gradients(self, loss: Tensor) -> Values:
        """The gradients of all parameters, which are not accumulated."""
        names, parameters = list(self._parameters), list(self._parameters.values())
        if not (loss.requires_grad and parameters):
            return dict.fromkeys(names)
        seed = torch.as_tensor(self._scale).to(loss)
        with without_autocast(self._pipeline.layout.devices):
            found = torch.autograd.grad(loss, parameters, seed.expand_as(loss), allow_unused=True)
        scale = float(seed)
        return {
            name: None if gradient is None else on_cpu(gradient) / scale
            for name, gradient in zip(names, found, strict=True)
        }


def _named_parameters(models: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The trained parameters by their names, each once."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{name} of the pipeline" if name in found else name] = parameter
    return found


def _changed(change: Callable[[Tensor], Tensor], layer: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that changes what a layer returns."""
    return change_tensors(output, change)
