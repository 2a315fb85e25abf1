"""The values that training_step logs for micro-batches, logged once for the batch.

They are combined as the step would have reduced its rows. A metric that is called returns the value
of a micro-batch, so a copy is updated beside it, from its initial state, for that of the batch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_gpipe.core.data import memory
from lightning_gpipe.core.faithful import LazyManagers, Manager, patched, together
from lightning_gpipe.core.pipeline import Outcome
from lightning_gpipe.core.run import in_layers, loss_and_weight
from lightning_gpipe.strategy.step_results import mean_of

_SIGNATURE = inspect.signature(L.LightningModule.log)

Arguments = Mapping[str, Any]  # of a call of log


def arguments_of_log(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a LightningModule's ``log``, by name."""
    arguments = _SIGNATURE.bind(None, *args, **kwargs).arguments
    return {name: value for name, value in arguments.items() if name != "self"}


class CollectedLogs:
    """Stands in for the ``log`` of a LightningModule while its step runs for micro-batches.

    Values are combined as means weighted like the losses, or by the ``batch_size`` in the calls.
    ``current`` returns the index of the micro-batch whose step runs.
    """

    def __init__(self, module: L.LightningModule, current: Callable[[], int]) -> None:
        self._module = module
        self._current = current
        self._log: Callable[..., None] = module.log
        # By the name of the value: for its first call in a step, its second ..., by micro-batch.
        self._calls: dict[str, list[dict[int, Arguments]]] = {}

    def collecting(self) -> Manager:
        # A method, since what an object in an attribute holds is state of the module.
        return patched([(vars(self._module), "log", self.__call__)])

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if in_layers():
            self._log(*args, **kwargs)  # which refuses it
        call = arguments_of_log(*args, **kwargs)
        value = call["value"]
        call["value"] = value.detach() if isinstance(value, Tensor) else value
        i = self._current()
        calls = self._calls.setdefault(call["name"], [])
        for of_micro_batches in calls:
            if i not in of_micro_batches:
                of_micro_batches[i] = call
                return
        calls.append({i: call})

    def write(self, outcome: Outcome, metrics: BatchMetrics) -> None:
        for calls in self._calls.values():
            for of_micro_batches in calls:
                arguments = _combined(of_micro_batches, outcome)
                value = metrics.value([call["value"] for call in of_micro_batches.values()])
                if value is not None:
                    arguments["value"] = value
                if arguments.get("on_step") is not False:
                    metrics.finish(arguments["value"])
                self._log(**arguments)


class BatchMetrics:
    """The values of metrics for one batch, while a step calls them for micro-batches."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Metric, Metric]] = {}  # by the id of the metric: it, its copy
        self._called: Counter[int] = Counter()  # how often, by the same id
        # By the address of its memory: a value, and of which metric.
        self._returned: dict[int, tuple[Tensor, int]] = {}

    def watched(self, modules: Iterable[nn.Module]) -> Manager:
        self._called.clear()
        self._returned.clear()
        modules = list(modules)
        metrics = _metrics_among(modules)
        # A group of metrics whose states are equal after a micro-batch may differ after the batch.
        ungrouped = patched(
            (vars(each), "_enable_compute_groups", False)
            for each in modules
            if isinstance(each, MetricCollection) and not each._groups_checked
        )

        def update(*call: Any) -> None:  # no method: a copy of a metric would copy what it is of
            self._update(*call)

        hooks = (metric.register_forward_hook(update, with_kwargs=True) for metric in metrics)
        return together([ungrouped, LazyManagers(lambda: hooks)])

    def finish(self, metric: Any) -> None:
        if id(metric) in self._called:
            metric._forward_cache = self._copies[id(metric)][1].compute()

    def value(self, values: Sequence[Any]) -> Any:
        """Return the value of the batch, where calls of one metric returned those of micro-batches.

        Or a part of it, such as that of a class. None where ``values`` are others, or are not of
        all calls of the metric.
        """
        addresses = map(memory, values)
        found = [None if x is None else self._returned.get(x) for x in addresses]
        returned = [each for each in found if each is not None]
        if len(returned) < len(values) or len({key for _, key in returned}) > 1:
            return None
        (whole, key), part = returned[0], values[0]
        if len(values) != self._called[key]:
            return None
        value = self._copies[key][1].compute()
        if part.shape == whole.shape:
            return value
        if not isinstance(value, Tensor) or value.shape != whole.shape:
            return None
        place = part.storage_offset() - whole.storage_offset()
        value = value.contiguous()
        return value.as_strided(part.shape, part.stride(), value.storage_offset() + place)

    def _update(self, metric: Metric, args: Any, kwargs: Any, returned: Any) -> None:
        if in_layers():
            return
        key = id(metric)
        if key not in self._copies:
            self._copies[key] = metric, _for_steps(metric)
        copy = self._copies[key][1]
        if key not in self._called:
            copy.reset()
        self._called[key] += 1
        copy.update(*args, **kwargs)
        if isinstance(returned, Tensor) and (address := memory(returned)) is not None:
            self._returned[address] = returned, key


def _for_steps(metric: Metric) -> Metric:
    """Return a copy of a metric for one step; its state is not copied: it may have a graph."""
    states: list[Any] = [
        value
        for each in _metrics_among(metric.modules())
        # A wrapper has the defaults of the metric within.
        for value in (each._forward_cache, each._computed, *map(vars(each).get, each._defaults))
    ]
    tensors = {id(x): x.detach() for x in states if isinstance(x, Tensor)}
    empty = {id(x): type(x)() for x in states if type(x) in (list, dict)}
    copy = deepcopy(metric, tensors | empty)
    for each in _metrics_among(copy.modules()):
        each._to_sync = each.dist_sync_on_step
    return copy


def _metrics_among(modules: Iterable[nn.Module]) -> list[Metric]:
    return [module for module in modules if isinstance(module, Metric)]


def _combined(calls: Mapping[int, Arguments], outcome: Outcome) -> dict[str, Any]:
    order = sorted(calls)
    last = calls[order[-1]]
    sizes: list[Any] = [calls[i].get("batch_size") for i in order]
    values = [calls[i]["value"] for i in order]
    arguments, weights = dict(last), [outcome.weights[i] for i in order]
    if None not in sizes:
        arguments["batch_size"] = sum(sizes)
        losses = [loss_and_weight(outcome.results[i])[0] for i in order]
        if not all(map(_same, values, losses)):
            weights = sizes
    if not isinstance(last["value"], Metric):
        arguments["value"] = _reduced(last.get("reduce_fx", "mean"), values, weights)
    return arguments


def _reduced(by: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
    tensors = isinstance(values[0], Tensor)
    match getattr(by, "__name__", by):
        case "sum":
            return sum(values)
        case "min":
            return torch.stack(list(values)).amin(0) if tensors else min(values)
        case "max":
            return torch.stack(list(values)).amax(0) if tensors else max(values)
        case _:
            return mean_of(values, weights)


def _same(value: Any, loss: Tensor | None) -> bool:
    """Return True if a value is the loss; reading it would wait for its device."""
    return isinstance(value, Tensor) and loss is not None and value.data_ptr() == loss.data_ptr()
