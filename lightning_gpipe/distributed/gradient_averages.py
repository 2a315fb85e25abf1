"""The averages over replicas of the gradients of stages, which leave before all backwards ended.

DistributedDataParallel begins to average a gradient when it arrives at the parameter. All those of
a pipeline do so at once, at the end. So the gradients of a stage are summed up here, in buckets,
from the stage's action G on, and autograd gets the averages.

# Note [The same collectives in all replicas]
Workers are threads, and replicas may differ: in the number of micro-batches, in the parameters that
a layer has used, in what their code does beside the pipeline. Yet all must take part in the same
collectives, in the same order, or gradients of different parameters would be added. So the buckets
depend on the model alone. Stages are sent from the last to the first, each by whichever thread
completes what is next; once in each step that averages; and in a group of their own, which the
calling thread does not use. With each stage goes the number of the step, in which all must agree.

A parameter may get gradients that are not in the sum of its stage, or have hooks that must see its
gradient before it is averaged. The pipeline may run several times in a step, or not at all. Then
the replica has no share in the average, and tells so: when the backward has ended, all replicas
average the ``.grad`` of such parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_gpipe.core.faithful import has_hooks, has_memory
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run import GradientHome, GradientTransfer
from lightning_gpipe.core.transport import OutOfStep, is_broken_connection
from lightning_gpipe.distributed.group import FAILURE_TIMEOUT, Watcher

Pair = tuple[Tensor, Tensor]  # a leaf and its gradient
Bucket = Sequence[nn.Parameter]  # of one dtype, on one device


def own_parameters(root: nn.Module, layout: Layout) -> dict[int, list[nn.Parameter]]:
    """Return the parameters of each stage of this process that no other module of a model has.

    Those that need dense gradients: for others DistributedDataParallel is told by their modules.
    """
    stage_of = {
        module: j
        for j, partition in enumerate(layout.partitions)
        for layer in partition.layers
        for module in layer.modules()
    }
    users: dict[int, set[int | None]] = {}
    for module in dict.fromkeys([*root.modules(), *stage_of]):
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(None if sparse else stage_of.get(module))
    return {
        j: [
            parameter
            for parameter in layout.partitions[j].parameters
            if parameter.requires_grad and has_memory(parameter) and users[id(parameter)] == {j}
        ]
        for j in layout.stages_here
    }


class GradientAverages(GradientHome):
    """Averages the gradients of the stages of this process over replicas.

    Args:
        stages: The parameters of each stage, the same in all replicas.
        group: The processes that have these stages; nothing else uses it.
        watcher: Knows which process has failed.
        cap: The bytes of a bucket.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        group: ProcessGroup,
        watcher: Watcher,
        cap: float,
    ) -> None:
        self.buckets = {
            j: _buckets(stages[j], cap) for j in sorted(stages, reverse=True) if stages[j]
        }
        self.group = group
        self._watcher = watcher
        self._cap = cap
        self.outside: Collection[int] = ()
        self.adds = True
        self._active = False
        self._steps = 0  # so far
        self._begun = False  # whether the transfer of this step has
        self._late: dict[int, nn.Parameter] = {}  # whose .grad is to be averaged, in order

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the same order in all replicas."""
        return list(chain.from_iterable(chain.from_iterable(self.buckets.values())))

    @contextmanager
    def averaging(self, outside: Collection[int] = (), *, adds: bool = True) -> Iterator[None]:
        """A ``with`` block in which the gradients of mini-batches are averaged.

        Args:
            outside: The ids of parameters that get gradients from outside of the stages, too.
            adds: Whether gradients are added to ``.grad``, which is to be averaged with them.
        """
        hooked = {id(p) for p in self.parameters if has_hooks(p)}
        self.outside, self.adds, self._active = hooked.union(outside), adds, True
        try:
            yield
        finally:
            self._active = False

    @override
    def begin(self) -> GradientTransfer | None:
        if not self._active or self._begun:
            return None
        self._begun = True
        return _AveragedTransfer(self, self._steps)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for collectives, and raise an error that names a process by which they fail."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            failure = (
                self._watcher.failure(FAILURE_TIMEOUT) if is_broken_connection(error) else None
            )
            raise error if failure is None else failure from error

    def add_late(self, parameter: nn.Parameter) -> None:
        """Average the ``.grad`` of a parameter in :meth:`finish`; called alike in all replicas."""
        self._late[id(parameter)] = parameter

    def finish(self) -> None:
        """Average what could not leave early, once autograd has written all gradients."""
        if not self._begun:  # in other replicas the loss depends on the pipeline
            transfer = _AveragedTransfer(self, self._steps)
            transfer.open(set(map(id, self.parameters)))
            for j in self.buckets:
                transfer.send(j, [])
            for leaf, average in transfer.receive():
                leaf.grad = average if leaf.grad is None else leaf.grad.add_(average)
        self._steps, self._begun = self._steps + 1, False
        late, self._late = list(self._late.values()), {}
        if not late:
            return
        there = [parameter.grad is not None for parameter in late]
        notes = _counts(self.group, there, late[0].device)
        dist.all_reduce(notes, group=self.group)
        late = [each for each, replicas in zip(late, notes.tolist(), strict=True) if replicas]
        for bucket in _buckets(late, self._cap):
            flat = _Flat.of(bucket)
            for parameter, part in zip(bucket, flat.parts, strict=True):
                if parameter.grad is not None:
                    part.copy_(parameter.grad)
            flat.values.mul_(1.0 / self.group.size())
            dist.all_reduce(flat.values, group=self.group)
            for parameter, part in zip(bucket, flat.parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = part
                else:
                    parameter.grad.copy_(part)


class _AveragedTransfer(GradientTransfer):
    """Averages the gradients of one mini-batch."""

    # Note [The same collectives in all replicas]

    def __init__(self, averages: GradientAverages, number: int) -> None:
        self._averages = averages
        self._number = number
        self._lock = threading.Lock()
        self._complete: dict[int, tuple[dict[int, Tensor], Any]] = {}  # with their streams
        self._next = iter(averages.buckets)
        self._awaited = next(self._next, None)
        self._opened = False
        self._outside: frozenset[int] = frozenset()
        self._factor: Tensor | None = None
        self._sent: list[_Sent] = []
        self._own: list[Pair] = []  # of parameters that have others outside

    @override
    def send(self, j: int, pairs: Sequence[Pair]) -> list[Pair]:
        if (buckets := self._averages.buckets.get(j)) is None:
            return list(pairs)
        here = {id(parameter) for parameter in chain.from_iterable(buckets)}
        with self._lock:
            gradient_of = {id(leaf): x for leaf, x in pairs if id(leaf) in here}
            device = buckets[0][0].device
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._complete[j] = gradient_of, stream
            self._send_next()
        return [pair for pair in pairs if id(pair[0]) not in here]

    @override
    def open(self, outside: Collection[int] = (), factor: Tensor | None = None) -> None:
        with self._lock:
            self._outside = frozenset(outside).union(self._averages.outside)
            self._factor = factor
            self._opened = True
            self._send_next()

    def _send_next(self) -> None:
        while self._opened and self._awaited in self._complete:
            gradient_of, stream = self._complete.pop(self._awaited)
            with torch.cuda.stream(stream), torch.no_grad():
                self._sent.append(self._sum(self._averages.buckets[self._awaited], gradient_of))
            self._awaited = next(self._next, None)

    def _sum(self, buckets: Sequence[Bucket], gradient_of: Mapping[int, Tensor]) -> _Sent:
        """Begin to add up the gradients of a stage over the replicas."""
        group = self._averages.group
        parameters = list(chain.from_iterable(buckets))
        flats = list(map(_Flat.of, buckets))
        parts = list(chain.from_iterable(flat.parts for flat in flats))
        outside = [id(parameter) in self._outside for parameter in parameters]
        shares = [
            self._fill(part, parameter, gradient_of.get(id(parameter)))
            for parameter, part in zip(parameters, parts, strict=True)
        ]
        notes = _counts(group, [self._number, *outside, *shares], parts[0].device)
        tensors = [notes, *(flat.values for flat in flats)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        return _Sent(parameters, parts, notes, works)

    def _fill(self, part: Tensor, parameter: nn.Parameter, gradient: Tensor | None) -> bool:
        """Write the share of this replica of an average, and return whether it has one."""
        if gradient is not None and self._factor is not None:
            gradient.mul_(self._factor.to(gradient.device, gradient.dtype))
        if id(parameter) in self._outside:
            if gradient is not None:
                self._own.append((parameter, gradient))
            return False
        before = parameter.grad if self._averages.adds else None
        if gradient is not None:
            part.copy_(gradient)
        if before is not None:
            part.add_(before)
            parameter.grad = None
        part.mul_(1.0 / self._averages.group.size())
        return gradient is not None or before is not None

    @override
    def receive(self) -> list[Pair]:
        assert self._awaited is None, "all stages have sent their gradients"
        pairs = list(self._own)
        for sent in self._sent:
            self._averages.wait(sent.works)
            number, *counts = sent.notes.tolist()
            if number != self._number * self._averages.group.size():
                raise OutOfStep(
                    "all replicas must average the gradients of the same steps: got step "
                    f"{self._number} of the fit here, and another step in another replica. Let all "
                    "of them run as many batches, and the same callbacks."
                )
            size = len(sent.parameters)
            noted = zip(sent.parameters, sent.parts, counts[:size], counts[size:], strict=True)
            for parameter, part, outside, shares in noted:
                if outside:
                    self._averages.add_late(parameter)
                if shares:  # else no replica has a gradient
                    pairs.append((parameter, part))
        self._sent, self._own = [], []
        return pairs


def _counts(group: ProcessGroup, numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers to be added up over the replicas, on the host if the group can do that."""
    host = torch.device("cpu") in group._device_types
    return torch.tensor(numbers, device="cpu" if host else device)


class _Sent(NamedTuple):
    """The gradients of a stage on their way.

    Attributes:
        parameters: The parameters of all buckets.
        parts: Their averages.
        notes: The sums over replicas of the number of the mini-batch and, for each parameter, of 1
            if a replica has gradients from outside, and of 1 if it has a share in the average.
        works: What is to be waited for.
    """

    parameters: Sequence[nn.Parameter]
    parts: Sequence[Tensor]
    notes: Tensor
    works: Sequence[Any]


class _Flat(NamedTuple):
    """The memory of a bucket.

    Attributes:
        values: All of it, zeros at first.
        parts: The part of each parameter, in its shape.
    """

    values: Tensor
    parts: Sequence[Tensor]

    @classmethod
    def of(cls, bucket: Bucket) -> _Flat:
        values = torch.zeros(
            sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device
        )
        pieces = values.split([p.numel() for p in bucket])
        return cls(values, [_as(p, piece) for p, piece in zip(bucket, pieces, strict=True)])


def _as(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Return a part of a bucket in the shape of a parameter, and dense in the order of its dims."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())


def _buckets(parameters: Sequence[nn.Parameter], cap: float) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of one dtype and device, of some bytes each."""
    buckets: list[list[nn.Parameter]] = []
    open_of: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], float]] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        bucket, size = open_of.get(key, ([], cap))
        if size >= cap:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_of[key] = bucket, size + parameter.numel() * parameter.element_size()
    return buckets
