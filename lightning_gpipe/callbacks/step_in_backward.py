"""Steps of the optimizer beside the backward.

An optimizer steps when all gradients are there, and with weights on the host GPUs wait for it. Yet
the gradients of the last stage are complete while all other stages still run backward. So each
stage is stepped as soon as its gradients are at home.

Nobody can look at all gradients together any more, and a backward that fails leaves a model of
which some stages have been stepped. So the user must ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gpipe.callbacks.running import pipeline_of, strategy_of
from lightning_gpipe.core.faithful import add_note, has_hooks
from lightning_gpipe.core.profile import joins_parameters
from lightning_gpipe.core.run import GradientHome, GradientTransfer, leaves_around, own_parameters

Pair = tuple[Tensor, Tensor]  # a parameter and its gradient

# Hooks that may look at the gradients of all.
_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_MODULE = (
    *_HOOKS,
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
_OF_PRECISION = ("post_backward", "clip_gradients")


class StepInBackward(Callback):
    """Steps the parameters of each stage while earlier stages still run backward.

    Example::

        strategy = GPipeStrategy([1] * 32, chunks=16, weights="host")
        Trainer(strategy=strategy, callbacks=[StepInBackward()])

    The numbers are those without it. It is for ``weights="host"``, where the step is the work of
    the CPU. Parameters without a stage of their own are stepped after the backward, as ever: those
    around the pipeline, shared ones, those with hooks, and those that the loss uses directly. If
    the backward of a stage fails, others may have been stepped, and the error says which.

    The optimizer must step each parameter by itself, as those of torch.optim do.

    Raises:
        TypeError: If the strategy makes no pipeline.
        ValueError: When the fit begins: if the gradients are needed together, as for clipping, a
            gradient scaler, or a hook or an override that acts on them; with several optimizers,
            processes or replicas, manual optimization, or a loss for each micro-batch; and if
            weights are on a GPU.
    """

    def __init__(self) -> None:
        self._home: _EarlySteps | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reasons = _reasons(trainer, pl_module, self)
        if reasons:
            raise ValueError(
                "StepInBackward steps a stage before all gradients are there: got "
                f"{', '.join(reasons)}. Leave that out, or the callback."
            )
        self._home = _EarlySteps(trainer.optimizers[0])

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pipeline_of(trainer, self).engine.home = self._home

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        assert self._home is not None, "the training has begun"
        outside = leaves_around(loss) if loss.requires_grad else None
        if outside is None or trainer.fit_loop._should_accumulate():
            self._home.prepare({})
        else:
            stages = own_parameters(pl_module, pipeline_of(trainer, self).layout)
            self._home.prepare(stages, set(map(id, outside)))

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._home is not None and (stages := self._home.stages_of_a_failed_step()):
            add_note(
                exception,
                "StepInBackward: the optimizer has stepped the parameters of stages "
                f"{', '.join(map(str, stages))} in this step, and no others. Go on from a "
                "checkpoint.",
            )
        self._end()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline_of(trainer, self).engine.home = None
        self._end()

    def _end(self) -> None:
        if self._home is not None:
            self._home.close()
            self._home = None


def _reasons(trainer: Trainer, module: LightningModule, callback: Callback) -> list[str]:
    """Return the settings that need all gradients at once, or are not supported."""
    options, optimizers = strategy_of(trainer, callback).options, trainer.optimizers
    others = [each for each in trainer.callbacks if each is not callback]  # type: ignore[attr-defined]
    pipeline = pipeline_of(trainer, callback)
    joining = [type(each).__name__ for each in optimizers if joins_parameters(each)]
    refused = {
        f"Trainer(gradient_clip_val={trainer.gradient_clip_val})": trainer.gradient_clip_val,
        f"precision={trainer.precision!r}": getattr(trainer.precision_plugin, "scaler", None),
        "manual optimization": not module.automatic_optimization,
        f"schedule={options.schedule!r}": options.schedule != "fill_drain",
        f"processes={options.processes!r}": options.processes != "single",
        f"replicas={options.replicas}": options.replicas > 1,
        f"{len(pipeline.layouts)} pipelines": len(pipeline.layouts) > 1,
        f"{len(optimizers)} optimizers": len(optimizers) != 1,
        f"{', '.join(joining)}, which joins parameters": joining,
        "hooks of the optimizer's step": any(
            each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in optimizers
        ),
    }
    overriding = [(module, name) for name in _OF_MODULE]
    overriding += [(each, name) for each in others for name in _HOOKS]
    for owner, name in overriding:
        refused[f"{type(owner).__name__}.{name}"] = is_overridden(name, owner)
    precision = type(trainer.precision_plugin)
    for name in _OF_PRECISION:
        library = getattr(precision, name).__module__.startswith("lightning.")
        refused[f"{precision.__name__}.{name}"] = not library
    parameters = (p for part in pipeline.layout.partitions for p in part.parameters)
    refused["weights on GPUs"] = any(p.device.type != "cpu" for p in parameters)
    return [name for name, there in refused.items() if there]


class _EarlySteps(GradientHome):
    """Steps the parameters of stages on a thread, for which the optimizer's step waits."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpipe-step-in-backward")
        self._transfer: _Steps | None = None
        self._stages: Mapping[int, Collection[int]] = {}

    def prepare(
        self, stages: Mapping[int, Sequence[nn.Parameter]], outside: Collection[int] = ()
    ) -> None:
        """Set the parameters of each stage to step in the next backward.

        Those with hooks, and ``outside`` ones, which get other gradients too, are left out.
        """
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._stages = {
            j: stepped.intersection(id(p) for p in own if not has_hooks(p)).difference(outside)
            for j, own in stages.items()
        }

    @override
    def begin(self) -> GradientTransfer | None:
        stages, self._stages = self._stages, {}
        if not stages:
            return None
        self._transfer = _Steps(stages, lambda pairs: self._thread.submit(self._step, pairs))
        return self._transfer

    def stages_of_a_failed_step(self) -> list[int]:
        """Return the stages that were stepped in a backward that has not ended."""
        transfer, self._transfer = self._transfer, None
        return [] if transfer is None else transfer.stepped()

    def close(self) -> None:
        self._thread.shutdown()

    def _step(self, pairs: Sequence[Pair]) -> None:
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        own = {id(parameter) for parameter, _ in pairs}
        parts = [
            {**group, "params": [p for p in group["params"] if id(p) in own]} for group in groups
        ]
        parts = [part for part in parts if part["params"]]
        settings, counts = [{**part} for part in parts], _numbers_of(optimizer)
        for parameter, gradient in pairs:
            # That of the batches before is there, if gradients are accumulated.
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.param_groups = parts
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        changed = [name for name, x in _numbers_of(optimizer).items() if counts.get(name) != x]
        if parts != settings or changed:
            what = f"attribute {changed[0]!r}" if changed else "parameter groups"
            raise RuntimeError(
                "StepInBackward needs an optimizer that steps each parameter by itself: "
                f"{type(optimizer).__name__} changes its {what} in a step."
            )
        for parameter, _ in pairs:
            parameter.grad = None


def _numbers_of(optimizer: Optimizer) -> dict[str, float]:
    return {name: x for name, x in vars(optimizer).items() if type(x) in (int, float)}


class _Steps(GradientTransfer):
    """The steps in one backward, of the parameters of each stage that may be stepped."""

    def __init__(
        self, stages: Mapping[int, Collection[int]], step: Callable[[Sequence[Pair]], Future[None]]
    ) -> None:
        self._stages = stages
        self._step = step
        self._under_way: dict[int, Future[None]] = {}

    @override
    def send(self, j: int, pairs: Sequence[Pair]) -> list[Pair]:
        own = self._stages.get(j, ())
        if taken := [pair for pair in pairs if id(pair[0]) in own]:
            self._under_way[j] = self._step(taken)
        return [pair for pair in pairs if id(pair[0]) not in own]

    @override
    def open(self, outside: Collection[int] = (), factor: Tensor | None = None) -> None:
        pass  # all that is outside is known, and there is one loss

    @override
    def receive(self) -> list[Pair]:
        for step in self._under_way.values():
            step.result()
        self._under_way.clear()
        return []  # nothing is left for ``.grad``

    def stepped(self) -> list[int]:
        """Wait, and return the stages whose parameters were stepped."""
        return sorted(j for j, step in self._under_way.items() if step.exception() is None)
