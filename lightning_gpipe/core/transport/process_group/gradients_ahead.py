"""Gradients that are announced before they are computed, with the first one of a backward.

A process must know the form of a tensor before it can receive it straight from a GPU, and the form
of an activation is known once it is computed: its values may decide it. But a gradient has the form
of its activation, which both processes have had by then. So the first gradient between two workers
carries the announcements of those after it in the row, and they come without a message::

    sender    announce B0 B1 B2, send B0 | send B1 | send B2 | announce B3, send B3
    receiver  receive B0, receive B1, receive B2, queued on the GPU | receive B3

The last one is announced when it is sent. So no process ends a phase before all have done their
part, and what its header signals is complete.

An announced gradient is sent, in this order and whatever happens. Where there is no gradient, or
the run fails, zeros go in its place, and another value that would overtake goes over the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gpipe.core.data import FlatTree, requires_grad
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.schedules import Action, Kind, Schedule, successor
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.lone_tensor import has_number
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import (
    DenseForm,
    bytes_in,
    form_and_bytes,
    is_dense,
)

_MINIBATCHES = 8  # the most whose backwards may come
_MOST = 1 << 25  # bytes that are announced at once, since the receiver has memory for them at once


class _Announced(NamedTuple):
    """A gradient that another process waits for."""

    rank: int
    form: DenseForm


# The forms of gradients, by the actions that need them; None for those that others may overtake.
KnownForms = dict[Action, DenseForm | None]


class Forms:
    """The forms of gradients that are known, from each forward to its backward."""

    def __init__(self) -> None:
        self._by_minibatch: dict[tuple[int, int], KnownForms] = {}

    def of(self, failed: int, label: Label) -> KnownForms:
        """Return those for a phase, after ``failed`` failed runs; a forward has none at first."""
        minibatch = failed, label.minibatch
        if label.phase:
            return self._by_minibatch.pop(minibatch, {})
        self._by_minibatch.pop(minibatch, None)  # it runs again
        for oldest in [*self._by_minibatch][: 1 - _MINIBATCHES]:
            del self._by_minibatch[oldest]  # its output may have been dropped
        return self._by_minibatch.setdefault(minibatch, {})


class GradientsAhead:
    """Sends the values of one backward that go straight, and announces some ahead.

    Nothing is announced ahead in a phase that has forwards too.
    """

    def __init__(self, layout: Layout, phase: Schedule, forms: KnownForms, links: Links) -> None:
        self._forms = forms
        self._links = links
        self._layout = layout
        self._phase = phase
        self._next: dict[Action, Action] | None = None  # until it is needed
        self._lock = threading.Lock()
        self._announced: dict[Action, _Announced] = {}  # in the order in which they are sent

    def record(self, rank: int, mail: Mail) -> None:
        """Record the gradient's form from an activation that has come straight from a process.

        Those of values on other routes would overtake it, so with these none is known.
        """
        (kind, i, j), leaves = mail.to, mail.value.leaves
        if kind is not Kind.FORWARD or not any(map(requires_grad, leaves)):
            return
        if mail.route is not None:
            stages = self._layout.stages_at(rank)
            self._forms.update((Action(Kind.BACKWARD, i, j), None) for j in stages)
        elif len(leaves) == 1 and has_number(leaves[0].dtype):
            form, content = form_and_bytes(leaves[0].detach(), (leaves[0].device.index, 0))
            if form.stored == form.size and len(content):
                self._forms.setdefault(Action(Kind.BACKWARD, i, j - 1), form)

    def post(self, rank: int, header: Header, mail: Mail) -> None:
        """Send a value to another process, which may have been announced."""
        with self._lock:
            if mail.route is None and mail.to in self._announced:
                self._send(mail.to, mail.value)
                return
            others = [each for each in self._announced.values() if each.rank == rank]
            if any(each.form.gpus == mail.gpus for each in others):
                mail = mail._replace(gpus=None)
            ahead = self._after(rank, mail) if mail.route is None and mail.gpus else {}
            told = [mail._replace(to=to).announcement(x.form) for to, x in ahead.items()]
            self._links.post(rank, header, mail, told)
            self._announced |= ahead  # not before: what nobody waits for can never be sent

    def abandon(self) -> None:
        """Send the announced gradients: the run has failed."""
        with self._lock:
            self._next = {}
            for to in [*self._announced]:
                self._send(to, FlatTree([]))

    def _after(self, rank: int, mail: Mail) -> dict[Action, _Announced]:
        ahead: dict[Action, _Announced] = {}
        size = 0
        if self._next is None:
            self._next = {} if self._phase.forwards else dict(_pairs(self._layout, self._phase))
        to = self._next.get(mail.to) if self._forms.get(mail.to) else None
        while to is not None and (form := self._forms.get(to)) is not None:
            size += form.nbytes
            if size > _MOST:
                break
            ahead[to] = _Announced(rank, form._replace(gpus=mail.gpus))
            to = self._next.get(to)
        return ahead

    def _send(self, to: Action, value: FlatTree) -> None:
        rank, form = self._announced.pop(to)
        assert form.gpus is not None, "it goes straight"
        gradient = value.leaves[0] if value.leaves else None
        self._links.post_announced(rank, form.gpus, _bytes_of(gradient, form, form.gpus[0]))


def _pairs(layout: Layout, phase: Schedule) -> Iterator[tuple[Action, Action]]:
    for w in layout.workers_here:
        rows: dict[int, list[Action]] = {}
        for action in phase.rows[w]:
            to = successor(action)
            if action.kind is Kind.BACKWARD and to.j >= 0 and layout.owner_of(to.j) != layout.rank:
                rows.setdefault(layout.placement[to.j], []).append(to)
        for row in rows.values():
            yield from pairwise(row[:-1])


def _bytes_of(gradient: Tensor | None, form: DenseForm, gpu: int) -> Tensor:
    if gradient is not None and is_dense(gradient):
        found, content = form_and_bytes(gradient, form.gpus)
        if found == form:
            return content
    device = torch.device("cuda", gpu)
    room = torch.empty_strided(form.stored, form.stride, dtype=form.dtype, device=device)
    if gradient is None:
        return bytes_in(room.zero_())
    return bytes_in(room.copy_(gradient.to_dense()))  # the same one, unless it is sparse
