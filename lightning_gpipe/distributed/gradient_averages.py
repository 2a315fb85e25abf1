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

If replicas share gradients, the second stage of ZeRO, an average is only in the replica that owns
the parameter. So no replica keeps the gradients of a backward, and each backward is averaged, those
that accumulate too; the owner adds up the averages. The gradients of parameters that are not in
stages come at the end, with those above.

If they share parameters, too, those of other replicas have no values here, and no ``.grad``: a
gradient that is averaged at the end of a backward is held until then.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_gpipe.core.faithful import has_hooks
from lightning_gpipe.core.run import GradientHome, GradientTransfer
from lightning_gpipe.core.transport import OWN, OutOfStep
from lightning_gpipe.distributed.buckets import Bucket, buckets_of, wait_for
from lightning_gpipe.distributed.group import Watcher
from lightning_gpipe.distributed.shares import Shares, counts, total

Pair = tuple[Tensor, Tensor]  # a leaf and its gradient

_WITHOUT_CALL = ", in a step without a call of the pipeline"


class GradientAverages(GradientHome):
    """Averages the gradients of the stages of this process over replicas.

    Args:
        stages: The parameters of each stage, the same in all replicas.
        group: The processes that have these stages; nothing else uses it.
        cap: The bytes of a bucket.
        shares: The owners of the parameters, if only these get averages.
        rest: The other parameters whose gradients are averaged here.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[nn.Parameter]],
        group: ProcessGroup,
        watcher: Watcher,
        cap: float,
        *,
        shares: Shares | None = None,
        rest: Sequence[nn.Parameter] = (),
    ) -> None:
        self.buckets = {
            j: buckets_of(stages[j], cap, shares) for j in sorted(stages, reverse=True) if stages[j]
        }
        self.group = group
        self._watcher = watcher
        self._cap = cap
        self._shares = shares
        self._rest = rest
        self.outside: Collection[int] = ()
        self.adds = True
        self._active = False
        self._steps = 0  # so far
        self._begun = False  # whether the transfer of this step has
        self._late: dict[int, nn.Parameter] = {}  # whose .grad is to be averaged, in order
        self._averages: dict[int, Pair] = {}  # to be added to .grad when it is an average, too
        self._keeps = shares is not None and any(map(shares.keeps, self.parameters))
        self._held: dict[int, Tensor] = {}  # in the place of .grad, by the ids of parameters

    @property
    def parameters(self) -> list[nn.Parameter]:
        buckets = chain.from_iterable(self.buckets.values())
        return [parameter for bucket in buckets for parameter in bucket.parameters]

    @contextmanager
    def averaging(self, outside: Collection[int] = (), *, adds: bool = True) -> Iterator[None]:
        """A ``with`` block in which the gradients of mini-batches are averaged.

        ``outside`` are the ids of parameters that get gradients from outside of the stages, too.
        With ``adds``, gradients are added to ``.grad``, which is averaged with them.
        """
        hooked = {id(p) for p in self.parameters if has_hooks(p)}
        self.outside, self._active = hooked.union(outside), True
        self.adds = adds and self._shares is None  # else what is there is an average
        try:
            yield
        finally:
            self._active = False

    @override
    def begin(self) -> GradientTransfer | None:
        if not self._active:
            return None
        if self._begun:  # all gradients of this step are averaged at its end
            return _HeldTransfer(self) if self._keeps else None
        self._begun = True
        return _AveragedTransfer(self, self._steps)

    def wait(self, works: Sequence[Any]) -> None:
        wait_for(works, self._watcher)

    def wait_for_all(self, works: Iterable[Any]) -> None:
        alone = self._keeps and not self._begun  # others wait for weights of this replica
        what = f"the gradients of all replicas{_WITHOUT_CALL * alone}"
        with OWN.next("gradients", dist.get_process_group_ranks(self.group), what):
            wait_for(works, self._watcher)

    def hold(self, parameter: Tensor, gradient: Tensor) -> None:
        """Hold the gradient of a parameter that has no values here, and so no ``.grad``."""
        before = self._held.get(id(parameter))
        self._held[id(parameter)] = gradient if before is None else before + gradient

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return parameter.device if self._shares is None else self._shares.device_of(parameter)

    def add_late(self, parameter: nn.Parameter, average: Tensor | None) -> None:
        """Average the ``.grad`` of a parameter in :meth:`finish`, and add an average to it."""
        self._late[id(parameter)] = parameter
        if average is not None:
            self._add(parameter, average)

    def _add(self, parameter: nn.Parameter, average: Tensor) -> None:
        pair = self._averages.get(id(parameter))
        self._averages[id(parameter)] = parameter, average if pair is None else pair[1] + average

    @torch.no_grad()
    def set_aside(self) -> None:
        """Begin a backward: set gradients aside that are averages, if replicas share them."""
        if self._shares is None:
            return
        for parameter in [*self.parameters, *self._rest]:
            if parameter.grad is not None:
                self._add(parameter, parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Average what could not leave early, once autograd has written all gradients."""
        if not self._begun:  # in other replicas the loss depends on the pipeline
            transfer = _AveragedTransfer(self, self._steps)
            transfer.open(set(map(id, self.parameters)))
            for j in self.buckets:
                transfer.send(j, [])
            transfer.receive()
        self._steps, self._begun = self._steps + 1, False
        late, self._late = [*self._late.values(), *self._rest], {}
        if late:
            self._average_late(late)
        averages, self._averages = self._averages, {}
        for parameter, average in averages.values():
            if parameter.grad is not None:
                average.add_(parameter.grad)
            parameter.grad = average

    def _average_late(self, late: Sequence[nn.Parameter]) -> None:
        held, self._held = self._held, {}
        gradient_of = {id(p): held.get(id(p), p.grad) for p in late}
        there = [gradient_of[id(parameter)] is not None for parameter in late]
        some = total(self.group, there, self._device_of(late[0]))
        late = [each for each, replicas in zip(late, some, strict=True) if replicas]
        for bucket in buckets_of(late, self._cap, self._shares):
            flat = bucket.empty()
            for parameter, part in zip(bucket.parameters, flat.parts, strict=True):
                gradient = gradient_of.pop(id(parameter))
                if gradient is not None:
                    part.copy_(gradient)
                    parameter.grad = None
            flat.values.mul_(1.0 / self.group.size())
            self.wait([bucket.sum(flat, self.group, async_op=True)])
            if bucket.is_for(self.group):
                for parameter, part in zip(bucket.parameters, flat.parts, strict=True):
                    parameter.grad = part


class _AveragedTransfer(GradientTransfer):
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
    def send(self, j: int, pairs: list[Pair]) -> list[Pair]:
        if (buckets := self._averages.buckets.get(j)) is None:
            return pairs
        here = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
        left = [pair for pair in pairs if id(pair[0]) not in here]
        with self._lock:
            gradient_of = {id(leaf): x for leaf, x in pairs if id(leaf) in here}
            pairs.clear()  # the memory of a gradient is free once it is in its bucket
            device = buckets[0].device
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            self._complete[j] = gradient_of, stream
            self._send_next()
        return left

    @override
    def open(self, outside: Collection[int] = (), factor: Tensor | None = None) -> None:
        with self._lock:
            self._outside = frozenset(outside).union(self._averages.outside)
            self._factor = factor
            self._opened = True
            self._send_next()

    def _send_next(self) -> None:
        while self._opened and self._awaited in self._complete:
            for sent in self._sent:
                self._averages.wait(sent.drop_done())
            gradient_of, stream = self._complete.pop(self._awaited)
            with torch.cuda.stream(stream), torch.no_grad():
                self._sent.append(self._sum(self._averages.buckets[self._awaited], gradient_of))
            self._awaited = next(self._next, None)

    def _sum(self, buckets: Sequence[Bucket], gradient_of: dict[int, Tensor]) -> _Sent:
        group = self._averages.group
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        outside = [id(parameter) in self._outside for parameter in parameters]
        shares = [
            not apart and (id(parameter) in gradient_of or self._before(parameter) is not None)
            for parameter, apart in zip(parameters, outside, strict=True)
        ]
        notes = counts(group, [self._number, *outside, *shares], buckets[0].device)
        sent = _Sent(parameters, {}, notes, [dist.all_reduce(notes, group=group, async_op=True)])
        for bucket in buckets:
            flat = bucket.empty()
            for parameter, part in zip(bucket.parameters, flat.parts, strict=True):
                self._fill(part, parameter, gradient_of.pop(id(parameter), None))
            sent.works.append(bucket.sum(flat, group, async_op=True))
            if bucket.is_for(group):
                sent.parts.update(zip(map(id, bucket.parameters), flat.parts, strict=True))
        return sent

    def _before(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad if self._averages.adds else None

    def _fill(self, part: Tensor, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Write the share of this replica of an average, if it has one."""
        if gradient is not None and self._factor is not None:
            gradient.mul_(self._factor.to(gradient.device, gradient.dtype))
        if id(parameter) in self._outside:
            if gradient is not None and parameter.is_meta:
                self._averages.hold(parameter, gradient)
            elif gradient is not None:
                self._own.append((parameter, gradient))
            return
        if gradient is not None:
            part.copy_(gradient)
        if (before := self._before(parameter)) is not None:
            part.add_(before)
            parameter.grad = None
        part.mul_(1.0 / self._averages.group.size())

    @override
    def receive(self) -> list[Pair]:
        assert self._awaited is None, "all stages have sent their gradients"
        pairs = list(self._own)
        self._averages.wait_for_all(chain.from_iterable(sent.works for sent in self._sent))
        for sent in self._sent:
            number, *numbers = sent.notes.tolist()
            if number != self._number * self._averages.group.size():
                raise OutOfStep(
                    "all replicas must average the gradients of the same steps: got step "
                    f"{self._number} of the fit here, and another step in another replica. Let all "
                    "of them run as many batches, and the same callbacks."
                )
            size = len(sent.parameters)
            noted = zip(sent.parameters, numbers[:size], numbers[size:], strict=True)
            for parameter, outside, shares in noted:
                part = sent.parts.get(id(parameter)) if shares else None  # a replica has a gradient
                if outside:
                    self._averages.add_late(parameter, part)
                elif part is not None:
                    pairs.append((parameter, part))
        self._sent, self._own = [], []
        return pairs


class _HeldTransfer(GradientTransfer):
    """Holds gradients of another mini-batch of a step, which have no ``.grad`` to go to."""

    def __init__(self, averages: GradientAverages) -> None:
        self._averages = averages
        self._held: list[Pair] = []
        self._factor: Tensor | None = None

    @override
    def send(self, j: int, pairs: list[Pair]) -> list[Pair]:
        self._held += [pair for pair in pairs if pair[0].is_meta]
        return [pair for pair in pairs if not pair[0].is_meta]

    @override
    def open(self, outside: Collection[int] = (), factor: Tensor | None = None) -> None:
        self._factor = factor

    @override
    def receive(self) -> list[Pair]:
        for parameter, gradient in self._held:
            if self._factor is not None:
                gradient.mul_(self._factor.to(gradient.device, gradient.dtype))
            self._averages.hold(parameter, gradient)
        return []


class _Sent(NamedTuple):
    """The gradients of a stage on their way."""

    parameters: Sequence[nn.Parameter]
    parts: dict[int, Tensor]  # the averages that this replica gets, by the ids of parameters
    # Sums over replicas: of the number of the mini-batch and, for each parameter, of 1 if a replica
    # has gradients from outside, and of 1 if it has a share in the average.
    notes: Tensor
    works: list[Any]  # the collectives to wait for

    def drop_done(self) -> list[Any]:
        """Drop the collectives that have ended, with the buckets that only they have."""
        done = [work for work in self.works if work.is_completed()]
        self.works[:] = [work for work in self.works if work not in done]
        return done
