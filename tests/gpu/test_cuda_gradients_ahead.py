"""Gradients between GPUs of two processes: announced together, sent whatever happens.

Here are the tests of ``gradients_ahead``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpipe import GPipe, RankFailed
from lightning_gpipe.core.data import tree_flatten
from lightning_gpipe.core.schedules import Action, Kind, fill_drain
from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group import gradients_ahead
from lightning_gpipe.core.transport.process_group.gradients_ahead import Forms, GradientsAhead
from lightning_gpipe.core.transport.process_group.wire.links import Links
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair
from tests.gpu.channels import needs_nccl
from tests.gpu.models import ON_GPU
from tests.gpu.test_cuda_channels import only_simulated
from tests.gpu.test_cuda_processes import TWO, hazards
from tests.support.faults import Fuse, OwnError
from tests.support.models import rows
from tests.support.processes import assert_equal, processes
from tests.support.ranks import NCCL, Pool, new_ranks

pytestmark = [
    *ON_GPU,
    needs_nccl,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]
OWNERS, DEVICES = TWO
M = 6


class Sent(NamedTuple):
    """How a process has sent gradients.

    Attributes:
        messages: Those by a message of their own, or the first of several.
        announced: Those that an earlier message had announced.
    """

    messages: list[Action]
    announced: list[Any]


@contextmanager
def recorded() -> Iterator[Sent]:
    """A ``with`` block that records what this process sends."""
    sent = Sent([], [])
    post, post_announced = Links.post, Links.post_announced

    def record(links: Links, rank: int, header: Any, mail: Any, ahead: Any = ()) -> None:
        if mail.to.kind is Kind.BACKWARD and mail.to.j >= 0:
            sent.messages.append(mail.to)
        post(links, rank, header, mail, ahead)

    def record_announced(links: Links, rank: int, gpus: GpuPair, content: Tensor) -> None:
        sent.announced.append(len(content))
        post_announced(links, rank, gpus, content)

    with (
        patch.object(Links, "post", record),
        patch.object(Links, "post_announced", record_announced),
    ):
        yield sent


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Growing(nn.Module):
    """Adds as many rows as its values say, others for each micro-batch and step."""

    def forward(self, x: Tensor) -> Tensor:
        more = int(x.detach().abs().sum().mul(1e3).item()) % 4
        return torch.cat([x, x[:1].expand(more, -1)])


class Ending(nn.Module):
    """Lets no gradient through for some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        even = int(x.detach().abs().sum().mul(1e3).item()) % 2
        return x.detach() if even else x


class Transposed(nn.Module):
    """Outputs a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + x.T.sum()).T.contiguous().T


class Complex(nn.Module):
    """Outputs complex numbers, which no short message has a number for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, 2 * x)


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x).sum(-1)


LAYERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "plain": lambda: (Plain(), Plain()),
    "shapes by values": lambda: (Growing(), Plain()),
    "gradients by values": lambda: (Plain(), Ending()),
    "not contiguous": lambda: (Transposed(), Plain()),
    "complex": lambda: (Complex(), Real()),
}


def train(kind: str, spread: bool) -> tuple[list[Any], list[Sent], list[str]]:
    """Three steps: losses and gradients of what is here, how these were sent, and hazards."""
    torch.manual_seed(0)
    first, second = LAYERS[kind]()
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3), first), nn.Sequential(second, Last()))
    options = processes(OWNERS, NCCL) if spread else {}
    pipeline = GPipe(module.double(), [1, 1], devices=DEVICES, chunks=M, **options)
    found, sent = [], []
    for k in range(3):
        with recorded() as sends:
            loss = pipeline(rows(3 * M, seed=k)).square().mean()
            pipeline.zero_grad()
            loss.backward()
        here = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
        found.append((loss.detach().cpu(), here))
        sent.append(sends)
    pipeline.close()
    return found, sent, hazards() if spread else []


class Last(nn.Module):
    """A row for each micro-batch, and a parameter beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(0, keepdim=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_announced_together(four_ranks: Pool, kind: str) -> None:
    """Two messages for a backward: one with the first gradient, and one with the last."""
    expected, *_ = train(kind, spread=False)

    (first, none, races), (second, sent, more) = four_ranks.run(train, kind, True, among=2)

    for k, (loss, gradients) in enumerate(expected):
        assert_equal((first[k][0], second[k][0]), (loss, loss))
        assert_equal({**first[k][1], **second[k][1]}, gradients)
    assert not [*races, *more]
    assert none == [([], [])] * 3
    for sends in sent:
        assert len(sends.messages) + len(sends.announced) == M
        if kind == "complex":
            assert not sends.announced
        elif kind != "gradients by values":
            assert [to.i for to in sends.messages] == [M - 1, 0]  # the order of a backward


# Failures.


@pytest.mark.parametrize("i", [M - 1, 2, 0])
def test_backward_that_fails(four_ranks: Pool, i: int) -> None:
    """No process ends it, whatever it has been sent ahead, and the next step is sound."""
    expected, *_ = train("plain", spread=False)

    for loss, races in four_ranks.run(fail_in_backward, i, among=2):
        assert_equal(loss, expected[0][0])
        assert not races


def fail_in_backward(i: int) -> tuple[Tensor, list[str]]:
    """A step whose backward of micro-batch ``i`` fails in the second process, and another one."""
    torch.manual_seed(0)
    fuse = Fuse()
    first, second = nn.Sequential(nn.Linear(3, 3), Plain()), nn.Sequential(fuse, Last())
    module = nn.Sequential(first, second).double()
    pipeline = GPipe(module, [1, 1], devices=DEVICES, chunks=M, **processes(OWNERS, NCCL))

    def fail() -> None:
        raise OwnError("burnt")

    if dist.get_rank() == 1:
        fuse.light(("backward", i), fail)
    loss = pipeline(rows(3 * M, seed=0)).square().mean()
    with pytest.raises(OwnError if dist.get_rank() == 1 else RankFailed):
        loss.backward()
    loss = pipeline(rows(3 * M, seed=0)).square().mean()
    loss.backward()
    pipeline.close()
    return loss.detach().cpu(), hazards()


# Mistakes that must not be made: each is one, and is found.


def in_another_order(layout: Any, phase: Any) -> Any:
    """As :func:`_pairs`, of every other gradient."""
    later = dict(PAIRS(layout, phase))
    return ((to, later.get(after, after)) for to, after in later.items())


def with_the_last(layout: Any, phase: Any) -> Any:
    """As :func:`_pairs`, with the last one."""
    later = dict(PAIRS(layout, phase))
    before = next(after for after in later.values() if after not in later)
    return (*later.items(), (before, before._replace(i=before.i - 1)))


PAIRS = gradients_ahead._pairs


@only_simulated
@pytest.mark.parametrize("mistake", [in_another_order, with_the_last])
def test_mistake_is_found(mistake: Any) -> None:
    with new_ranks(2) as ranks:
        pool = Mistaken(ranks, partial(patch, f"{gradients_ahead.__name__}._pairs", mistake))
        test: Any = test_gradients_announced_together
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            test(pool, "plain")


class Mistaken(NamedTuple):
    """Processes in which a mistake is made."""

    ranks: Any
    patched: Callable[[], Any]

    def run(self, function: Callable[..., Any], *args: Any, among: int) -> list[Any]:
        return self.ranks.run(make, self.patched, function, *args)


def make(patched: Callable[[], Any], function: Callable[..., Any], *args: Any) -> Any:
    """Run a function with a mistake."""
    with patched():
        return function(*args)


# Without processes.


class RecordedLinks:
    """Records what a process would send to another one."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def post(self, rank: int, header: Any, mail: Mail, ahead: Sequence[bytes]) -> None:
        self.sent.append((mail.to.i, mail.gpus is not None, len(ahead)))

    def post_announced(self, rank: int, gpus: GpuPair, content: Tensor) -> None:
        self.sent.append((rank, gpus, content.cpu().view(torch.float64).tolist()))


GPUS = 0, 1


def begin(m: int = 4, *, known: int = 4, phase: int = 1) -> tuple[RecordedLinks, GradientsAhead]:
    """The phase of a second process, to which the forms of some gradients are known."""
    layout: Any = SimpleNamespace(
        n=2,
        workers_here=[1],
        rank=1,
        placement=(0, 1),
        owner_of=lambda j: (0, 1)[j],
        stages_at=lambda rank: [rank],
    )
    schedule = fill_drain(m, (0, 1))
    links: Any = RecordedLinks()
    ahead = GradientsAhead(layout, schedule.phase(phase), {}, links)
    for i in range(m - known, m):
        x = torch.ones(2, dtype=torch.float64, device="cuda:0", requires_grad=True)
        ahead.record(0, Mail(Action(Kind.FORWARD, i, 1), None, tree_flatten(x)))
    return links, ahead


def post(ahead: GradientsAhead, i: int, value: float | None, route: int | None = None) -> None:
    x = None if value is None else torch.full((2,), value, dtype=torch.float64, device="cuda:0")
    gpus = None if value is None else GPUS
    mail = Mail(Action(Kind.BACKWARD, i, 0), route, tree_flatten(x), [x is not None], gpus)
    ahead.post(0, Header(MessageCode.VALUES, 1), mail)


def test_gradients_go_in_the_order_of_the_announcements() -> None:
    links, ahead = begin()
    for i in (3, 2, 1, 0):
        post(ahead, i, float(i))

    first, *announced, last = links.sent
    assert (first, last) == ((3, True, 2), (0, True, 0))
    assert announced == [(0, GPUS, [2.0, 2.0]), (0, GPUS, [1.0, 1.0])]


def test_value_that_would_overtake_goes_over_the_host() -> None:
    links, ahead = begin()
    post(ahead, 3, 3.0)
    post(ahead, 2, 5.0, route=0)
    post(ahead, 2, None)
    post(ahead, 1, 1.0)
    post(ahead, 0, 7.0, route=0)

    assert links.sent == [
        (3, True, 2),
        (2, False, 0),
        (0, GPUS, [0.0, 0.0]),
        (0, GPUS, [1.0, 1.0]),
        (0, True, 0),
    ]


def test_announced_gradient_that_is_sparse_goes_dense() -> None:
    links, ahead = begin()
    post(ahead, 3, 3.0)
    x = torch.tensor([0.0, 5.0], dtype=torch.float64).to_sparse()  # no simulated GPU has one
    mail = Mail(Action(Kind.BACKWARD, 2, 0), None, tree_flatten(x), [True])
    ahead.post(0, Header(MessageCode.VALUES, 1), mail)

    assert links.sent == [(3, True, 2), (0, GPUS, [0.0, 5.0])]


def test_announced_gradients_of_a_run_that_fails_are_zeros() -> None:
    links, ahead = begin()
    post(ahead, 3, 3.0)
    for _ in range(2):
        ahead.abandon()
    post(ahead, 2, 2.0)

    assert links.sent == [(3, True, 2), *[(0, GPUS, [0.0, 0.0])] * 2, (2, True, 0)]


def test_nothing_is_sent_for_announcements_that_failed() -> None:
    """Nobody would receive it: for want of memory, say, the first gradient could not be sent."""
    links, ahead = begin()
    with patch.object(links, "post", side_effect=OwnError), pytest.raises(OwnError):
        post(ahead, 3, 3.0)
    ahead.abandon()

    assert not links.sent


def test_no_more_is_announced_than_there_may_be_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients_ahead, "_MOST", 40)  # bytes, where a gradient has 16
    links, ahead = begin(8, known=8)
    for i in reversed(range(8)):
        post(ahead, i, 0.0)

    assert [sent[-1] for sent in links.sent if isinstance(sent[-1], int)] == [2, 2, 0, 0]


def test_only_known_forms_are_announced() -> None:
    links, ahead = begin(8, known=3)
    for i in reversed(range(8)):
        post(ahead, i, 0.0)

    assert [sent[-1] for sent in links.sent if isinstance(sent[-1], int)] == [2, 0, 0, 0, 0, 0]


def test_gradient_is_not_announced_ahead_where_another_one_may_overtake() -> None:
    """That of a skip tensor, which the same backward sends before it, and straight as well."""
    links, ahead = begin()
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    ahead.record(0, Mail(Action(Kind.FORWARD, 1, 1), 0, tree_flatten(x)))
    for i in (3, 2, 1):
        post(ahead, i, float(i))

    assert links.sent == [(3, True, 1), (0, GPUS, [2.0, 2.0]), (1, True, 0)]


def test_nothing_is_announced_ahead_beside_forwards() -> None:
    links, ahead = begin(phase=0)
    post(ahead, 3, 3.0)

    assert links.sent == [(3, True, 0)]


def test_forms_live_from_a_forward_to_its_backward() -> None:
    forms = Forms()
    forward, backward = (Label(minibatch=1, phase=phase) for phase in (0, 1))
    known = forms.of(0, forward)
    assert forms.of(1, backward) is not known  # of the first mini-batch after a failed run
    assert forms.of(0, backward) is known
    assert forms.of(0, backward) is not known
    latest = [forms.of(0, Label(minibatch=k)) for k in range(12)]
    found = [forms.of(0, Label(minibatch=k, phase=1)) is latest[k] for k in range(12)]
    assert found == [False] * 4 + [True] * 8
