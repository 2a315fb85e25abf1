"""Steps whose outputs only the first process gets, which tells the others their effects.

With ``outputs="last"`` the user's step goes on from its call of the pipeline in the process of the
last stage only, which is the first of the Trainer. Lightning's loop runs in all processes, which
must do the same after it. So the first one tells them the loss, what the step logged, which
buffers, random generators, attributes and options of optimizers it changed, and whether the Trainer
should stop. A metric of the module has seen all rows in the first process only, which computes it
for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.core.data import equal
from lightning_gpipe.core.faithful import BufferState, Journal, RandomState, version_of
from lightning_gpipe.core.run import StepAtLast
from lightning_gpipe.core.transport import OutputElsewhere
from lightning_gpipe.distributed import has_batch_hooks
from lightning_gpipe.strategy.inner_processes import InnerProcesses
from lightning_gpipe.strategy.left_on_modules import LeftOnModules, follow
from lightning_gpipe.strategy.optimizer_options import (
    Options,
    changed_options,
    options_of,
    set_options,
)
from lightning_gpipe.strategy.pipelined import PipelinedModule, modules_inside
from lightning_gpipe.strategy.processes import Processes
from lightning_gpipe.strategy.step_logs import arguments_of_log

_REDUCTIONS = "mean", "min", "max", "sum"

Call = dict[str, Any]  # the arguments of a call of log


class _State(NamedTuple):
    """The state before a step, which may change it."""

    random: RandomState
    buffers: BufferState  # of modules around the stages
    attributes: LeftOnModules
    parameters: list[tuple[str, str, nn.Parameter, int]]  # around the stages, with versions


class LastOutputs:
    """Runs the steps of a LightningModule, and tells the other processes their effects.

    ``at_ends`` is as for :class:`InnerProcesses`. ``called`` is True if the latest step has called
    the pipeline, ``have_batches`` if all processes have the values of batches, as the user's code
    changes these in hooks. Raises a ValueError if the pipeline has several modules.
    """

    def __init__(
        self,
        module: L.LightningModule,
        piped: PipelinedModule,
        processes: Processes,
        at_ends: Callable[[], Sequence[nn.Parameter]],
        changes: Journal,
    ) -> None:
        pipeline = piped.pipeline
        if len(pipeline.piped_modules) > 1:
            paths = [piped.path for piped in pipeline.piped_modules]
            raise ValueError(
                "outputs='last' needs one pipelined module, after whose call the step goes on in "
                f"the process of the last stage: got {paths}. Write outputs='all'."
            )
        self._module = module
        self._engine = pipeline.only.engine
        self._explain = processes.explain
        data = module.trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        self.have_batches = has_batch_hooks(module, data)
        self._inner = InnerProcesses(
            module,
            piped.modules[0],
            piped.inner,
            processes.pipeline_group,
            at_ends,
            changes,
            have_batches=self.have_batches,
        )
        self._step: StepAtLast | None = None
        self.called = True
        self._calls: list[tuple[str, Call]] = []  # of log in this step, by the module's path
        self._options: Options = {}  # of optimizers, as all processes had them in the latest step
        self._computes = False  # whether a metric is being computed for all
        inside = modules_inside(pipeline)
        self._modules = {path: each for path, each in module.named_modules() if each not in inside}
        metrics = Metric, MetricCollection  # which have states of their own
        self._all = {p: x for p, x in module.named_modules() if not isinstance(x, metrics)}
        self._metrics = {p: each for p, each in self._modules.items() if isinstance(each, Metric)}
        self._logs: dict[str, Callable[..., None]] = {}
        for path, each in self._modules.items():
            if isinstance(each, Metric):
                changes.write([(vars(each), "compute", partial(self._compute, each.compute))])
            if isinstance(each, L.LightningModule):
                self._logs[path] = each.log
                changes.write([(vars(each), "log", partial(self._log, path))])

    @property
    def alone(self) -> bool:
        """True if processes between both ends need not run steps like the latest one."""
        return not self._inner.lasting

    def run(
        self,
        step: Callable[[], Any],
        *,
        trains: bool,
        logging: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Any:
        """Return the result of a step; the others get its loss, if it ``trains``, or nothing.

        Its logs are written in ``logging()``. Raises a RuntimeError if it calls the pipeline twice,
        or optimizes by itself.
        """
        if trains and not self._module.automatic_optimization:
            raise RuntimeError(
                "outputs='last' needs automatic optimization: got automatic_optimization=False, "
                "with which training_step itself calls backward. Write outputs='all'."
            )
        before = self._state() if self._engine.layout.last_here else None
        self._calls, result = [], None
        try:
            with self._engine.outputs_at_last() as self._step:
                self._inner.begin()
                with suppress(OutputElsewhere):
                    result = step()
                self._inner.end()
            at_last, loss = self._step, result if trains else None
            self.called = at_last.called
        finally:
            self._step = None
        outcome = self._first_ones(partial(self._outcome, at_last, loss, before))
        self._calls = outcome["calls"]
        if not at_last.here:
            result = self._follow(at_last, outcome, result if at_last.called else None)
        with logging():
            self._replay(self._calls)
        return result

    def _state(self) -> _State:
        buffers = BufferState(list(self._modules.values()))
        parameters = [
            (path, name, parameter, version_of(parameter))
            for path, module in self._modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        return _State(RandomState.capture(), buffers, LeftOnModules(self._all), parameters)

    def _outcome(self, step: StepAtLast, result: Any, before: _State | None) -> Mapping[str, Any]:
        assert before is not None, "it is called in the first process"
        is_dict = isinstance(result, Mapping)
        loss = result.get("loss") if is_dict else result
        path_of = {each: path for path, each in self._modules.items()}
        return {
            "loss": loss.detach() if isinstance(loss, Tensor) else None,
            "requires_grad": isinstance(loss, Tensor) and loss.requires_grad,
            "leads": isinstance(loss, Tensor) and step.leads_to(loss),
            "is_dict": is_dict,
            "calls": self._calls,
            "updates": {path: metric._update_count for path, metric in self._metrics.items()},
            "buffers": [
                (path_of[owner], name, owner._buffers[name])
                for owner, name in before.buffers.changed
            ],
            "attributes": list(before.attributes.changes()),
            "parameters": [
                (path, name, parameter.detach())
                for path, name, parameter, version in before.parameters
                if version_of(parameter) != version
            ],
            "random": before.random.changes(),
            "options": self._changed_options(),
            "stops": self._module.trainer.should_stop,
            "left": self._inner.left,
            "layers": self._inner.calls,
        }

    def _follow(self, step: StepAtLast, outcome: Mapping[str, Any], result: Any) -> Any:
        """Follow the first process after its call; return the result of the step."""
        self._inner.compare(outcome["left"], outcome["layers"])
        RandomState.capture().follow(outcome["random"])
        for path, name, value in outcome["buffers"]:
            self._modules[path]._buffers[name] = value
        for path, name, value in outcome["parameters"]:
            parameter = self._modules[path]._parameters[name]
            if parameter is not None and not parameter.is_meta:
                _set_value(parameter, value.to(parameter.device))
        follow(self._all, outcome["attributes"])
        for path, count in outcome["updates"].items():
            self._metrics[path]._update_count = count
        self._set_options(outcome["options"])
        self._module.trainer.should_stop = outcome["stops"]
        loss = outcome["loss"]
        if loss is None:
            return None
        if isinstance(result, Tensor):  # with the gradients of all micro-batches
            loss = result
        elif step.zero is not None and outcome["leads"]:
            loss = loss + step.zero.to(loss)
        elif outcome["requires_grad"]:  # for parameters of the first process
            loss = loss.requires_grad_()
        return {"loss": loss} if outcome["is_dict"] else loss

    # Options of optimizers, such as learning rates, which code after the call may set.

    def _changed_options(self) -> Options:
        before, self._options = self._options, options_of(self._module.trainer.optimizers)
        return changed_options(before, self._options)

    def _set_options(self, changed: Options) -> None:
        """Give optimizers the options of the first process, whatever was set in this one."""
        self._options |= changed
        set_options(self._module.trainer.optimizers, self._options)

    # What is logged, and metrics.

    def _log(self, path: str, *args: Any, **kwargs: Any) -> None:
        call = arguments_of_log(*args, **kwargs)
        value, reduction = call["value"], call.get("reduce_fx")
        if callable(reduction):
            call["reduce_fx"] = _name_of(reduction, call["name"])
        if isinstance(value, Metric):
            call["value"] = {"metric": self._path_of(value), "of_step": value._forward_cache}
        elif isinstance(value, Tensor):
            call["value"] = value.detach()
        elif isinstance(value, Number):  # in the precision of the step
            dtype, device = torch.get_default_dtype(), self._module.device
            call["value"] = torch.tensor(value, dtype=dtype, device=device)
        if self._step is not None:  # after which all processes log it
            self._calls.append((path, call))
            return
        if not (isinstance(value, Metric) or call.get("rank_zero_only")):
            call["value"] = self._first_ones(partial(call.__getitem__, "value"))
        self._replay([(path, call)])

    def _replay(self, calls: Iterable[tuple[str, Call]]) -> None:
        for path, call in calls:
            value = call["value"]
            if isinstance(value, dict):
                metric = self._modules[value["metric"]]
                metric._forward_cache = value["of_step"]
                call = {**call, "value": metric}
            self._logs[path](**call)

    def _path_of(self, metric: Metric) -> str:
        for path, each in self._modules.items():
            if each is metric:
                return path
        raise ValueError(
            "a metric that is logged must be a module of the LightningModule with outputs='last', "
            f"by whose path other processes find theirs: got a {type(metric).__name__}. Assign it "
            "to self in __init__, or log its value."
        )

    def _compute(self, compute: Callable[[], Any]) -> Any:
        """Return the value of a metric, which the first process computes for all."""
        # Within a step, others may be ahead, or not run it.
        alone = self._step is not None and (self._step.called or self._inner.some)
        return compute() if alone or self._computes else self._first_ones(compute)

    def _first_ones(self, compute: Callable[[], Any]) -> Any:
        def explained() -> Any:
            # The others of this pipeline are told of what is raised here.
            try:
                return compute()
            except Exception as error:
                self._explain(error)
                raise

        self._computes = True
        try:
            return self._engine.everywhere(self._engine.layout.n - 1, explained)
        finally:
            self._computes = False


@torch.no_grad()
def _set_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Set the value of a parameter, unless it has it: autograd refuses edits of what it needs."""
    if not equal(parameter, value):
        parameter.copy_(value)


def _name_of(reduction: Callable[..., Any], logged: str) -> str:
    name = getattr(reduction, "__name__", "")
    if name not in _REDUCTIONS:
        raise ValueError(
            f"reduce_fx must be one of {', '.join(map(repr, _REDUCTIONS))} with outputs='last': "
            f"got {reduction!r} for log({logged!r}). Write one of these, or outputs='all'."
        )
    return name
