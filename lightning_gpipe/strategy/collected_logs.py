"""Logs the values that a training step logs for each micro-batch once for the batch.

The steps of micro-batches are suspended and go on in turns, so the order of their calls is not that
of the micro-batches, and the last call is not the value of the batch. So the calls are collected by
micro-batch, and combined as the step would have reduced its rows: means weighted by rows, or by the
``batch_size`` in the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_gpipe.core.run import in_layers

_SIGNATURE = inspect.signature(L.LightningModule.log)

Arguments = Mapping[str, Any]  # of a call of log


class CollectedLogs:
    """Stands in for the ``log`` of a LightningModule while its step runs for micro-batches.

    Args:
        module: The LightningModule.
        current: Returns the index of the micro-batch whose step runs.
    """

    def __init__(self, module: L.LightningModule, current: Callable[[], int]) -> None:
        self._module = module
        self._current = current
        self._log: Callable[..., None] = module.log
        self._own = module.__dict__.get("log")
        # By the name of the value: for its first call in a step, its second ..., by micro-batch.
        self._calls: dict[str, list[dict[int, Arguments]]] = {}

    def __enter__(self) -> None:
        self._module.__dict__["log"] = self

    def __exit__(self, *error: object) -> None:
        if self._own is None:
            del self._module.__dict__["log"]
        else:
            self._module.__dict__["log"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if in_layers():
            self._log(*args, **kwargs)  # which refuses it
        call = dict(_SIGNATURE.bind(self._module, *args, **kwargs).arguments)
        del call["self"]
        value = call["value"]
        call["value"] = value.detach() if isinstance(value, Tensor) else value
        i = self._current()
        calls = self._calls.setdefault(call["name"], [])
        for of_micro_batches in calls:
            if i not in of_micro_batches:
                of_micro_batches[i] = call
                return
        calls.append({i: call})

    def write(self, rows: Sequence[int]) -> None:
        for calls in self._calls.values():
            for of_micro_batches in calls:
                self._log(**_combined(of_micro_batches, rows))


def _combined(calls: Mapping[int, Arguments], rows: Sequence[int]) -> Arguments:
    order = sorted(calls)
    last = calls[order[-1]]
    sizes: list[Any] = [calls[i].get("batch_size") for i in order]
    arguments, weights = dict(last), [float(rows[i]) for i in order]
    if None not in sizes:
        arguments["batch_size"] = sum(sizes)
        weights = list(map(float, sizes))
    if not isinstance(last["value"], Metric):
        values = [calls[i]["value"] for i in order]
        arguments["value"] = _reduced(last.get("reduce_fx", "mean"), values, weights)
    return arguments


def _reduced(by: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
    if len(values) == 1:
        return values[0]
    tensors = torch.stack([torch.as_tensor(value, dtype=_dtype(value)) for value in values])
    match getattr(by, "__name__", by):
        case "sum":
            return tensors.sum(0)
        case "min":
            return tensors.amin(0)
        case "max":
            return tensors.amax(0)
        case _:
            share = torch.tensor(weights, dtype=tensors.dtype, device=tensors.device)
            return torch.tensordot(share / share.sum(), tensors, dims=1)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.dtype
    return torch.get_default_dtype()
