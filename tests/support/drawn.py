"""Runs drawn cases as a pipeline and as the plain module, and compares what came of each step.

After each step the pipeline must be equal to the plain nn.Sequential on one device, run on the
whole mini-batch or, if its layers mix, on one micro-batch after the other in one ordinary graph.
Its dropouts use the masks that the pipeline's drew. (A recomputation that drew other masks would be
detected: the outputs are those of one mask, the gradients of another.)
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_gpipe import collect_loss_terms, loss_term
from lightning_gpipe.core.data.marks import is_whole
from lightning_gpipe.core.data.pytree import FlatTree, map_tensors, tree_flatten, tree_unflatten
from lightning_gpipe.core.pipeline import GPipe
from tests.support.grammar import (
    GRAD,
    Case,
    Step,
    tensors,
)
from tests.support.models import assert_same, gradients, whole_batch_loss
from tests.support.vocabulary import Captured, Dropout, Repeated

Devices = Callable[[int], list[str]]  # of so many workers


def on_cpu(workers: int) -> list[str]:
    """All of them on the CPU."""
    return ["cpu"] * workers


class Record(NamedTuple):
    """What came of a step."""

    outputs: list[Any]
    require_grad: list[bool]
    loss: Tensor
    gradients: dict[str, Tensor]
    input_gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    hooks: dict[str, int]  # how often that of each parameter was called
    terms: dict[str, Tensor]
    captured: list[Tensor | None]  # the gradients of what layers use from outside


def run(
    case: Case, module: nn.Module, forward: Callable[[Any], Any], device: str = "cpu"
) -> list[Record]:
    """Take the steps with a module, or with what runs it, and with inputs on a device."""
    generator, calls, records = torch.Generator().manual_seed(case.seed), count_calls(module), []
    for step in case.steps:
        set_up(module, step, training=step.training)
        inputs = [case.model.tensor(rows, generator).to(device) for rows in step.rows]
        inputs = [x.requires_grad_(case.leaf and x.is_floating_point()) for x in inputs]
        with GRAD[step.grad](), collect_loss_terms() as terms:
            outputs = []
            for x in inputs:
                prepare(module)
                outputs.append(forward(case.model.input(x)))
        if step.grad != "grad":  # the plain module may return its input, which requires one
            outputs = [map_tensors(torch.detach, output) for output in outputs]
        loss = sum(map(loss_of, outputs), start=torch.zeros(()))
        loss = loss + 0.01 * sum(terms.values(), start=torch.zeros(()))
        if step.between is not None:
            set_up(module, step, training=step.training and step.between == "same")
            with torch.no_grad():
                x = case.model.tensor(step.rows[0], generator).to(device)
                outputs.append(forward(case.model.input(x)))
        if loss.requires_grad:
            loss.backward()
        records.append(
            Record(
                [map_tensors(torch.detach, output) for output in outputs],
                [x.requires_grad for x in tensors(outputs)],
                loss.detach(),
                {name: grad.to_dense().clone() for name, grad in gradients(module).items()},
                [x.grad for x in inputs],
                {name: buffer.clone() for name, buffer in module.named_buffers()},
                dict(sorted(calls.items())),
                {name: term.detach() for name, term in terms.items()},
                # Copies: autograd may add to them in place in the next step, or put others there.
                [
                    leaf.grad if leaf.grad is None else leaf.grad.clone()
                    for each in captured_in(module)
                    for leaf in each.leaves
                ],
            )
        )
        calls.clear()
        finish(module, step)
    return records


def captured_in(module: nn.Module) -> list[Captured]:
    return [each for each in module.modules() if isinstance(each, Captured)]


def prepare(module: nn.Module) -> None:
    for each in captured_in(module):
        each.prepare()


def set_up(module: nn.Module, step: Step, *, training: bool) -> None:
    module.train(training)
    for each in module.modules():
        if isinstance(each, Repeated):
            each.times = step.times


@torch.no_grad()
def finish(module: nn.Module, step: Step) -> None:
    for parameter in module.parameters():
        if step.then == "update" and parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-0.01)
        if step.then != "accumulate":
            parameter.grad = None


def loss_of(output: Any) -> Tensor:
    """The same loss, of outputs without rows too."""
    return whole_batch_loss(map_tensors(lambda x: x.reshape(len(x) if x.dim() else 1, -1), output))


def count_calls(module: nn.Module) -> Counter[str]:
    """Counts, by the parameter, the calls of hooks for gradients that have been accumulated."""
    calls: Counter[str] = Counter()

    def count(name: str, parameter: nn.Parameter) -> None:
        came: list[bool] = []
        parameter.register_hook(lambda gradient: came.append(gradient is not None))
        parameter.register_post_accumulate_grad_hook(lambda _: calls.update([name] * came.pop()))

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            count(name, parameter)
    return calls


def pipe(
    case: Case, module: nn.Sequential, devices: Devices = on_cpu, **options: Any
) -> list[Record]:
    """Take the steps with a module as a pipeline; ``options`` are further arguments of it."""
    chosen = devices(case.devices)
    pipeline = GPipe(
        module,
        case.balance,
        devices=chosen,
        chunks=case.chunks,
        activation_checkpointing=case.mode,
        deferred_batch_norm=case.deferred,
        threads=case.threads,
        split_backward=case.split,
        **options,
    )
    try:
        return run(case, pipeline, pipeline, chosen[0])
    finally:
        pipeline.close()


class Reference:
    """What a pipeline of ``pipelined`` must compute, computed by a copy of the plain module."""

    def __init__(self, case: Case, pipelined: nn.Sequential) -> None:
        self.module = deepcopy(pipelined)
        self._case = case
        self._dropouts = []
        for own, other in zip(self.module.modules(), pipelined.modules(), strict=True):
            if isinstance(own, Dropout) and isinstance(other, Dropout):
                own.masks = other.masks
                self._dropouts.append(own)

    def __call__(self, batch: Any) -> Any:
        mixes = self._case.model.mixes
        sizes = self._case.sizes(next(len(x) for x in tensors(batch) if has_rows(x)))
        if self._evaluates_whole:
            sizes = [sum(sizes)]
        for dropout in self._dropouts:
            dropout.taken = 1 if mixes else len(sizes)
        if not mixes:
            return self.module(batch)
        if self._case.deferred:
            return merge(self._deferring(split(batch, sizes), sizes))
        parts = zip(split(batch, sizes), sizes, strict=True)
        return merge([self._part(part, size / sum(sizes)) for part, size in parts])

    @property
    def _evaluates_whole(self) -> bool:
        norms = (each for each in self.module.modules() if isinstance(each, _BatchNorm))
        evaluates = not any(layer.training for layer in self.module)
        return evaluates and any(norm.running_mean is None for norm in norms)

    def _part(self, microbatch: Any, share: float) -> Any:
        """Run a micro-batch, whose loss terms that are means count by its share of the rows."""
        with collect_loss_terms() as terms:
            output = self.module(microbatch)
        for name, term in terms.items():
            loss_term(name, term if name == "sum" else share * term)
        return output

    def _deferring(self, microbatches: Sequence[Any], sizes: list[int]) -> list[Any]:
        """Feed every norm, in the end, all that it saw; only that counts for statistics."""
        norms = [
            each
            for each in self.module.modules()
            if isinstance(each, _BatchNorm | _InstanceNorm)
            and each.training
            and each.running_mean is not None
        ]
        before = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
        seen: list[list[list[Tensor]]] = [[] for _ in norms]
        hooks = [
            norm.register_forward_pre_hook(lambda _, args, calls=calls: calls[-1].append(args[0]))
            for norm, calls in zip(norms, seen, strict=True)
        ]
        outputs = []
        for microbatch, size in zip(microbatches, sizes, strict=True):
            for calls in seen:
                calls.append([])
            outputs.append(self._part(microbatch, size / sum(sizes)))
        for hook in hooks:
            hook.remove()
        for norm, values, calls in zip(norms, before, seen, strict=True):
            for buffer, value in zip(norm.buffers(), values, strict=True):
                buffer.data.copy_(value)  # behind the back of autograd, as batch norms do it
            for inputs in zip(*calls, strict=True):
                with torch.no_grad():
                    norm(torch.cat(inputs))
        return outputs


def has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not is_whole(leaf)


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Micro-batches, which layers may edit one by one."""
    leaves, spec = tree_flatten(batch)
    columns = [
        [part.clone() for part in leaf.split(sizes)] if has_rows(leaf) else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten(FlatTree(list(row), spec)) for row in zip(*columns, strict=True)]


def merge(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    columns = zip(*(tree_flatten(output).leaves for output in outputs), strict=True)
    return tree_unflatten(
        FlatTree([merge_leaf(list(column)) for column in columns], tree_flatten(outputs[0])[1])
    )


def merge_leaf(values: list[Any]) -> Any:
    if has_rows(values[0]):
        return torch.cat(values)
    stacks = isinstance(values[0], Tensor) and not is_whole(values[0])
    return torch.stack(values) if stacks else values[0]


def check(case: Case, devices: Devices = on_cpu, **options: Any) -> None:
    """Compare a pipeline with its reference, which is on the CPU."""
    with torch.random.fork_rng(devices=[]):
        module = case.build()
        parameters = dict(module.named_parameters())
        reference = Reference(case, module)
        actual = pipe(case, module, devices, **options)
        expected = run(case, reference.module, reference)

    for one, other in zip(actual, expected, strict=True):
        assert_same(map_tensors(Tensor.cpu, one._asdict()), other._asdict())
    assert module.state_dict().keys() == reference.module.state_dict().keys()
    assert all(p is parameters[name] for name, p in module.named_parameters())
    assert not any("forward" in each.__dict__ for each in module.modules())
