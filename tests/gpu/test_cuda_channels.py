"""Tensors that go straight from GPU to GPU: all that can do, and each mistake on the way is found.

Here are also the tests of ``channels`` and ``gpus``. That the numbers are those of one process is
also proven in ``test_cuda_processes``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from lightning_gpipe import GPipe, RankFailed
from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.schedules import Action, Kind
from lightning_gpipe.core.transport.process_group.connecting import groups
from lightning_gpipe.core.transport.process_group.connecting.gpus import GpuTable, over_nccl
from lightning_gpipe.core.transport.process_group.wire.channels import (
    ArrivingTensors,
    Channel,
    Channels,
)
from lightning_gpipe.core.transport.process_group.wire.link import Link
from lightning_gpipe.core.transport.process_group.wire.message import Header, Mail, MessageCode
from lightning_gpipe.core.transport.process_group.wire.tensor_bytes import GpuPair
from tests.gpu.channels import Ways, needs_nccl, recorded_ways
from tests.gpu.models import ON_GPU
from tests.gpu.test_cuda_processes import TWO, Run, end, four_gpus, hazards, step
from tests.lightning.test_schedules_over_processes import fit
from tests.support.faults import Fuse, OwnError
from tests.support.models import rows
from tests.support.processes import assert_equal, processes
from tests.support.ranks import NCCL, Pool, group_of, new_ranks
from tests.support.waiting import PATIENCE

pytestmark = [
    *ON_GPU,
    needs_nccl,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
]
only_simulated = pytest.mark.skipif(
    "SIMULATED_GPUS" not in os.environ, reason="needs simulated GPUs, which find hazards"
)
OWNERS, DEVICES = TWO
LOST_AFTER = 3.0  # seconds


def on_host(value: Any) -> Any:
    """A nested value with all tensors on the host."""
    leaves, structure = tree_flatten(value)
    moved = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(FlatTree(moved, structure))


# Which tensors go straight.


def test_every_boundary_tensor_goes_straight(four_ranks: Pool) -> None:
    """An output of each micro-batch there, and a gradient of each back."""
    found = four_ranks.run(chain, DEVICES, NCCL, among=2)

    assert [run.ways for run in found] == [[(0, 1)] * 4, [(1, 0)] * 4]


def chain(devices: list[str], backend: str) -> Run:
    """A step of four micro-batches on two stages, one in each process."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    options = processes(OWNERS, backend)
    pipeline = GPipe(module, [1, 1], devices=devices, chunks=4, **options)
    with recorded_ways() as ways:
        loss = pipeline(rows(8)).square().mean()
        loss.backward()
    return end(pipeline, loss.detach().cpu(), ways, OWNERS)


@pytest.mark.parametrize(
    "devices, backend", [(["cuda:0", "cuda:0"], NCCL), (DEVICES, "gloo")], ids=["one GPU", "gloo"]
)
def test_tensors_go_over_the_host(four_ranks: Pool, devices: list[str], backend: str) -> None:
    """Where two processes share a GPU, which NCCL refuses, and without NCCL."""
    straight = four_ranks.run(chain, DEVICES, NCCL, among=2)
    found = four_ranks.run(chain, devices, backend, among=2)

    for run, other in zip(found, straight, strict=True):
        assert run.ways == [None] * 4
        assert not run.hazards
        assert_equal((run.numbers, run.state), (other.numbers, other.state))


def test_gpus_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    store, patience = HashStore(), timedelta(seconds=PATIENCE)
    here, there = (torch.device("cuda", k) for k in (0, 1))
    own = GpuTable(store, {0: here, 1: torch.device("cpu")}, patience)
    GpuTable(store, {2: there, 3: here, 4: torch.device("cpu")}, patience)
    assert own.pair(here, 2) == (0, 1)
    assert own.pair(here, 3) is None  # the same one
    assert own.pair(here, 4) is None
    assert own.pair(torch.device("cpu"), 2) is None

    properties = torch.cuda.get_device_properties(0)
    part = type("Part", (), {"name": f"{properties.name} MIG 1g.10gb", "uuid": properties.uuid})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: part)
    GpuTable(store, {5: there}, patience)
    monkeypatch.undo()
    assert own.pair(here, 5) is None


def test_gpu_that_is_not_told_in_time() -> None:
    table = GpuTable(HashStore(), {0: torch.device("cuda:0")}, timedelta(milliseconds=1))

    with pytest.raises(RuntimeError, match="must tell the GPU of its worker: worker 1 did not"):
        table.pair(torch.device("cuda:0"), 1)


def test_backend_of_the_group_decides(four_ranks: Pool) -> None:
    assert set(four_ranks.run(backends, among=2)) == {(False, True)}


def backends() -> tuple[bool, bool]:
    assert over_nccl(None) == over_nccl(dist.group.WORLD)
    return over_nccl(group_of(2)), over_nccl(group_of(2, NCCL))


def test_announcements_and_sends_are_in_one_order() -> None:
    """Two workers may send to one process at once, which receives in the order it is told."""
    order: list[tuple[str, int]] = []
    channels = Mock()
    link = Link(Mock(), 1, Mock(), channels)

    def send(rank: int, gpus: GpuPair, tensors: Any) -> None:
        time.sleep(0.01)
        order.append(("send", gpus[0]))

    channels.send = send

    def announce(header: Header, body: bytes, tensors: Any, *, hold: bool) -> list[Any]:
        order.append(("announce", header.serial))
        return []

    def post(k: int) -> None:
        x = torch.ones(2, device=f"cuda:{k}")
        mail = Mail(Action(Kind.FORWARD, 0, 0), None, tree_flatten(x), [True], (k, 0))
        link.post_straight(Header(MessageCode.VALUES, k), mail)

    with patch.object(link, "post", announce), ThreadPoolExecutor(2) as threads:
        list(threads.map(post, [0, 1] * 8))

    pairs = [(name, k) for _, k in order[::2] for name in ("announce", "send")]
    assert order == pairs


def test_communicator_leaves_losses_to_the_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would end the process on an error, or after a time, before it says who is lost."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    variable = partial(os.environ.get, "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    nccl, handling = Mock(), []
    nccl.side_effect = lambda *_: handling.append(variable())
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", nccl, raising=False)

    Channels(HashStore(), 0)._channel(0, 1, (0, 1))

    nccl.Options.assert_called_once_with(is_high_priority_stream=True)
    assert nccl.Options()._timeout == timedelta(days=365)
    assert (handling, variable()) == (["0"], "2")


class Kinds(nn.Module):
    """Makes tensors of many kinds, some of the same memory."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        wide = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        return {
            "x": x,
            "again": x,
            "transposed": (2 * x).T,
            "expanded": x[:, :1].expand(-1, 7),
            "strided": torch.stack([x, -x])[:, :, ::2],
            "whole": wide,
            "half": x.to(torch.bfloat16),
            "mask": x > 0,
            "conjugate": torch.complex(x, x).conj(),
            "negative": torch.complex(x, x).conj().imag,
            "empty": x[:0],
            "number": torch.tensor(3.0, device=x.device),
            "length": torch.tensor([x.shape[0]]),  # on the host
            "rest": ("text", 4, None),
        }


class Sum(nn.Module):
    def forward(self, kinds: dict[str, Any]) -> Tensor:
        assert kinds["x"] is kinds["again"]
        assert kinds["rest"] == ("text", 4, None)
        assert kinds["length"].device.type == "cpu"
        x = kinds["x"] + kinds["again"] + kinds["transposed"].T + kinds["number"]
        x = x + kinds["expanded"].sum(1, keepdim=True) + kinds["strided"].sum((0, 2)).unsqueeze(1)
        x = (
            x
            + kinds["whole"]
            + kinds["half"] * kinds["mask"]
            + kinds["conjugate"].imag
            + kinds["negative"]
        )
        return x + kinds["empty"].sum() + kinds["length"].item()


@pytest.mark.parametrize("backend", ["gloo", NCCL])
def test_values_of_many_kinds(four_ranks: Pool, backend: str) -> None:
    [*found] = four_ranks.run(kinds, backend, among=2)
    expected = kinds(None)

    for numbers, ways, races in found:
        assert_equal(numbers, expected[0])
        assert set(ways) <= ({None} if backend == "gloo" else {(0, 1), (1, 0), None})
        assert not races
    assert found[0][1].count(None) == (2 if backend == "gloo" else 0)


def kinds(backend: str | None) -> tuple[Any, Ways, list[str]]:
    """Output and gradient of a module that passes tensors of many kinds on."""
    options = {} if backend is None else processes(OWNERS, backend)
    module = nn.Sequential(Kinds(), Sum())
    pipeline = GPipe(module, [1, 1], devices=DEVICES, chunks=2, **options)
    x = rows(6).detach().requires_grad_()
    with recorded_ways() as ways:
        y = pipeline(x)
        y.sum().backward()
    pipeline.close()
    return (y.detach().cpu(), x.grad), ways, hazards() if backend else []


# Trainers.


@pytest.mark.parametrize(
    "mode, schedule",
    [
        ("per_stage", "fill_drain"),
        ("per_stage", "1f1b"),
        ("per_stage", "zero_bubble_v"),
        pytest.param("per_node", "fill_drain", marks=four_gpus),
        pytest.param("per_node", "1f1b", marks=four_gpus),
        pytest.param("per_node", "zero_bubble", marks=four_gpus),
    ],
)
def test_fit(tmp_path: Path, two_ranks: Pool, mode: str, schedule: str) -> None:
    """The default of a Trainer on GPUs, and the same over Gloo."""
    args = mode, schedule
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        expected, *_ = fit_on_gpus(tmp_path / "single", "single", *args)
    straight = two_ranks.run(fit_on_gpus, tmp_path / "straight", mode, *args)
    over_host = two_ranks.run(fit_on_gpus, tmp_path / "host", mode, *args, False)

    parameters = expected.pop("parameters")
    for runs, is_straight in ((straight, True), (over_host, False)):
        for found, ways, races in runs:
            own = found.pop("parameters")
            assert_equal(own, {name: parameters[name] for name in own})
            assert_equal(found, expected)
            assert ways
            assert all((way is not None) == is_straight for way in ways)
            assert not races


@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b"])
def test_fit_with_the_outputs_in_the_last_process(
    tmp_path: Path, two_ranks: Pool, schedule: str
) -> None:
    args = "per_stage", schedule
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        expected, *_ = fit_on_gpus(tmp_path / "single", "single", *args)
    run = partial(fit_on_gpus, outputs="last")
    runs = two_ranks.run(run, tmp_path / "both", "per_stage", *args)

    for found, ways, races in runs:
        for name, parameter in found["parameters"].items():
            torch.testing.assert_close(parameter, expected["parameters"][name], rtol=0, atol=1e-12)
        assert found["end"] == pytest.approx(expected["end"], abs=1e-12)
        assert ways
        assert None not in ways
        assert not races


def fit_on_gpus(
    root: Path, processes: str, mode: str, schedule: str, straight: bool = True, **strategy: Any
) -> tuple[dict[str, Any], Ways, list[str]]:
    """A fit, the ways of what it sent, and the hazards in this process."""
    with (
        recorded_ways() as ways,
        nullcontext() if straight else patch.object(groups, "over_nccl", lambda group: False),
    ):
        options = {"accelerator": "gpu"}
        found = fit(root, processes, mode, schedule, "padded", options, **strategy)
    return on_host(found), ways, [] if processes == "single" else hazards()


# Mistakes that must not be made: each is one, and is found.


def received_too_early(channel: Channel, form: Any) -> Any:
    """As :meth:`Channel.receive`, without the wait."""
    with patch("tests.simcuda.nccl.Work.wait", lambda work: work.ended.wait(PATIENCE)):
        return RECEIVE(channel, form)


def told_nothing(arrival: ArrivingTensors, form: Any) -> Tensor:
    """As :meth:`ArrivingTensors.receive`, without the event."""
    stored, _ = arrival._channels.receive(arrival._rank, form)
    return stored


def sent_elsewhere(channel: Channel, contents: Any) -> None:
    """As :meth:`Channel.send`, on a stream that does not wait for what computes."""
    with torch.cuda.stream(torch.cuda.Stream(channel._device)):
        SEND(channel, contents)


def sent_and_forgotten(channel: Channel, contents: Any) -> None:
    """As :meth:`Channel.send`, without keeping the tensors."""
    for content in contents:
        channel._communicator.send([content], 1, 0)


def not_settled(channels: Channels) -> None:
    """Unlike :meth:`Channels.settle`."""


RECEIVE, SEND = Channel.receive, Channel.send
MISTAKES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a receive is not waited for": (Channel, "receive", received_too_early),
    "the event is lost": (ArrivingTensors, "receive", told_nothing),
    "sent before it is computed": (Channel, "send", sent_elsewhere),
    "let go before it is sent": (Channel, "send", sent_and_forgotten),
    "edited before it is sent": (Channels, "settle", not_settled),
}


@only_simulated
def test_each_mistake_is_found() -> None:
    with new_ranks(2) as ranks:
        found = {name: ranks.run(mistaken, name) for name in (None, *MISTAKES)}

    with_hazards = [name for name, runs in found.items() if any(run.hazards for run in runs)]
    assert with_hazards == [*MISTAKES]


def mistaken(name: str | None) -> Run:
    """Steps with a mistake, on GPUs that are so far behind that no send is known to have ended."""
    with (
        patch("tests.simcuda.nccl.Work.is_completed", lambda work: False),
        nullcontext() if name is None else patch.object(*MISTAKES[name]),
    ):
        return step(DEVICES, "1f1b", 2, "never", OWNERS, NCCL)


# Failures.


class Failing(nn.Module):
    """Two layers, of which the second can fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fuse = Fuse()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), self.fuse))
        self.double()

    def pipeline(self) -> GPipe:
        lost_after = timedelta(seconds=LOST_AFTER)
        options = processes(OWNERS, NCCL)
        return GPipe(
            self.layers, [1, 1], devices=DEVICES, chunks=4, lost_after=lost_after, **options
        )


@pytest.mark.parametrize("kind", ["forward", "backward", "connect"])
def test_process_that_dies_in_a_step(kind: str) -> None:
    with new_ranks(2) as ranks:
        found, died = ranks.outcomes(die, kind)

    assert "died" in str(died)
    text, seconds = found
    assert text.startswith("rank 1 (stage 1) is lost")
    assert seconds < 3 * LOST_AFTER


def die(kind: str) -> tuple[str, float]:
    """Steps, in the third of which the second process dies; how the first one ends.

    Or it dies in the first one, while the other waits for it in order to connect the GPUs.
    """
    model = Failing()
    pipeline = model.pipeline()
    if kind == "connect" and dist.get_rank() == 1:
        Channel.receive = lambda *_: os._exit(9)  # type: ignore[method-assign]  # it ends
    for k in range(3):
        if k == 2 and dist.get_rank() == 1 and kind != "connect":
            model.fuse.light((kind, 2), partial(os._exit, 9))
        began = time.monotonic()
        try:
            pipeline(rows(8)).square().mean().backward()
        except RankFailed as error:
            return str(error), time.monotonic() - began
    raise AssertionError("the other process must have died")


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_step_after_one_that_failed(four_ranks: Pool, kind: str) -> None:
    alone = GPipe(Failing().layers, [1, 1], devices=DEVICES, chunks=4)
    expected = alone(rows(8)).square().mean().detach().cpu()
    alone.close()

    found = four_ranks.run(recovered, kind, among=2)

    for loss, ways, _ in found:
        assert_equal(loss, expected)
        assert None not in ways


def recovered(kind: str) -> tuple[Tensor, Ways, list[str]]:
    """The loss of a step after one that has failed."""
    model = Failing()
    pipeline = model.pipeline()

    def fail() -> None:
        raise OwnError("burnt")

    with recorded_ways() as ways:
        if dist.get_rank() == 1:
            model.fuse.light((kind, 2), fail)
        with pytest.raises(OwnError if dist.get_rank() == 1 else RankFailed):
            pipeline(rows(8)).square().mean().backward()
        loss = pipeline(rows(8)).square().mean()
        loss.backward()
    pipeline.close()
    return loss.detach().cpu(), ways, hazards()


def test_channel_after_a_loss() -> None:
    channels = Channels(HashStore(), 0)
    channels.abort()
    channels.join()

    with pytest.raises(RuntimeError, match="a process is lost"):
        channels.send(1, (0, 1), [torch.ones(1, device="cuda:0")])


def test_end_waits_for_what_the_gpus_still_send() -> None:
    """Once the host has ended, an abort would end sends that the other process still awaits."""
    communicator, ended = Mock(), [False]
    communicator.send.return_value.is_completed = lambda: ended[0]
    channels = Channels(HashStore(), 0)
    with patch(f"{Channel.__module__}._communicator", return_value=communicator):
        channels.send(1, (0, 1), [torch.ones(1, device="cuda:0")])
        channels.settle()

    assert not channels.finish(0.01)
    ended[0] = True
    assert channels.finish(0.01)
    ended[0] = False
    channels.abort()
    assert channels.finish(0.01)
    channels.join()
    communicator.abort.assert_called_once_with()


# Memory.


def test_what_was_sent_is_freed_in_the_phase(four_ranks: Pool) -> None:
    """Else 1F1B would need the memory of all micro-batches, as the fill-drain schedule does."""
    first, second = four_ranks.run(most_in_flight, among=2)

    assert min(first, second) >= 1
    assert max(first, second) < 32


def most_in_flight() -> int:
    """The most tensors that a channel has kept while it sent those of 64 micro-batches."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    options = processes(OWNERS, NCCL)
    pipeline = GPipe(
        module, [1, 1], devices=DEVICES, chunks=64, activation_checkpointing="never", **options
    )
    kept = [0]

    def send(channel: Channel, contents: Any) -> None:
        SEND(channel, contents)
        kept.append(len(channel._sends))

    with patch.object(Channel, "send", send):
        pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(64), schedule="1f1b")
    pipeline.close()
    return max(kept)
