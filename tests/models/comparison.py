"""Compares a model in a pipeline with the plain model.

A step of both is a forward on the same 7 rows, and a backward from random cotangents of all that
the model returns, its loss among it. With a loss for each micro-batch the plain model runs on one
after the other. Compared are all tensors that are returned, or that loss, the gradients of all
parameters, the buffers, and the keys of the state dict. What is more than rounding is decided
as ``verify=True`` does it: see :mod:`lightning_gpipe.core.verify.compare`. No published
initialisation is kept: where blocks begin close to the identity, most errors would go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import map_tensors, named_leaves, tree_flatten, tree_unflatten
from lightning_gpipe.core.data.pytree import FlatTree
from lightning_gpipe.core.pipeline import GPipe
from lightning_gpipe.core.schedules import ByMicroBatch
from lightning_gpipe.core.verify.compare import deviations, tolerance_of
from tests.models.case import ROWS, Case
from tests.models.settings import CHUNKS, Setting, piped

SIZES = [3, 2, 2]  # the micro-batches of 7 rows


Values = Mapping[str, Tensor]
Model = Callable[..., Any]


class Run(NamedTuple):
    """What came of a step."""

    output: Values
    gradients: Values
    buffers: Values


def built(case: Case) -> nn.Module:
    """The model of a case, far from its initialisation, in the type that it is compared in."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.build().to(case.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if type(parameter) is not nn.Parameter:
                    continue  # it is quantised
                scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
                parameter.add_(torch.randn_like(parameter), alpha=0.5 * scale)
    return model


def inputs_of(case: Case) -> dict[str, Any]:
    """What the model of a case is called with."""
    inputs = dict(case.inputs(torch.Generator().manual_seed(1)))
    return map_tensors(lambda x: x.to(case.dtype) if x.is_floating_point() else x, inputs)


class Comparison:
    """Compares pipelines of a model with the plain model, which runs once in training and once not.

    Args:
        case: The model.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._model = built(case)
        self._inputs = inputs_of(case)
        self._plain: dict[tuple[bool, bool], Run] = {}

    def difference(self, setting: Setting, make: Callable[..., GPipe] = piped) -> str | None:
        """What differs between the model in a pipeline and the plain one, or None.

        Args:
            setting: How to run the pipeline.
            make: What makes the pipeline.
        """
        model = deepcopy(self._model).train(setting.training)
        pipeline = make(model, self._case, setting)
        try:
            forward: Model = pipeline
            if setting.schedule is not None:
                forward = partial(_loss_by_micro_batch, pipeline, setting.schedule)
            actual = step(model, forward, self._inputs)
            if pipeline.timeline is None:
                return "nothing ran as a pipeline"
            if model.state_dict().keys() != self._model.state_dict().keys():
                return "the keys of the state dict differ"
        finally:
            pipeline.close()
        return "; ".join(_beyond_rounding(self.plain(setting), actual)) or None

    def plain(self, setting: Setting) -> Run:
        """What comes of a step of the plain model."""
        key = setting.training, setting.schedule is None
        if key not in self._plain:
            model = deepcopy(self._model).train(setting.training)
            forward: Model = model
            if setting.schedule is not None:
                forward = partial(_mean_loss, model)
            elif self._case.mixes and setting.training:
                forward = in_microbatches(model)
            self._plain[key] = step(model, forward, self._inputs)
        return self._plain[key]


def step(model: nn.Module, forward: Model, inputs: Mapping[str, Any]) -> Run:
    """A forward by ``forward``, which may be a pipeline of ``model``, and its backward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        output = tensors(forward(**inputs))
    _loss(output).backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Run({path: x.detach() for path, x in output.items()}, gradients, buffers)


def tensors(output: Any) -> dict[str, Tensor]:
    """The tensors that a model returned, by their path."""
    return {path: leaf for path, leaf in named_leaves(output) if isinstance(leaf, Tensor)}


def in_microbatches(model: nn.Module) -> Model:
    """The plain model, run on one micro-batch after the other."""

    def forward(**inputs: Any) -> Any:
        return _merged([model(**piece) for piece in _pieces(inputs)])

    return forward


def _mean_loss(model: nn.Module, /, **inputs: Any) -> Tensor:
    """The mean of the losses of all micro-batches, weighted by their rows."""
    losses = [_loss(model(**piece)) for piece in _pieces(inputs)]
    return torch.stack(losses) @ torch.tensor(SIZES).to(losses[0]) / ROWS


def _loss_by_micro_batch(pipeline: GPipe, schedule: ByMicroBatch, /, **inputs: Any) -> Tensor:
    """The same of a pipeline, which runs each of them up to its loss."""
    outcome = pipeline.by_micro_batch(
        lambda piece: _loss(pipeline(**piece)), inputs, schedule=schedule
    )
    assert outcome.loss is not None, "there is a loss for each"
    return outcome.loss


def _pieces(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    columns = {
        name: list(x.split(SIZES)) if isinstance(x, Tensor) and len(x) == ROWS else [x] * CHUNKS
        for name, x in inputs.items()
    }
    for i in range(CHUNKS):
        yield {name: column[i] for name, column in columns.items()}


def _merged(outputs: Sequence[Any]) -> Any:
    columns = zip(*(tree_flatten(output).leaves for output in outputs), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
    return tree_unflatten(FlatTree(leaves, tree_flatten(outputs[0])[1]))


def _loss(output: Any) -> Tensor:
    """The sum of all that a model returned, times random cotangents."""
    leaves = [x for x in tensors(output).values() if x.requires_grad]
    return torch.stack([(x.double() * _cotangent(x)).sum() for x in leaves]).sum()


def _cotangent(x: Tensor) -> Tensor:
    """Random, the same for every tensor of this shape; of the size of a mean's."""
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return drawn / max(1, x.numel()) ** 0.5


def _beyond_rounding(plain: Run, pipelined: Run) -> Iterator[str]:
    dtypes = [x.dtype for values in plain for x in values.values()]
    tolerance = tolerance_of(dtypes, on_cuda=False)
    for kind, one, other in zip(Run._fields, plain, pipelined, strict=True):
        beyond = [each for each in deviations(one, other) if each.relative > tolerance]
        if beyond:
            worst = max(beyond, key=lambda each: each.relative)
            count = f"{len(beyond)} of {len({*one, *other})}"
            yield f"{kind}: {count} differ, such as {worst.name!r}, which {worst}"
