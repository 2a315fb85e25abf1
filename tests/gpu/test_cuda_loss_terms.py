"""Loss terms, captured tensors and those that layers use again, over several devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, collect_loss_terms, loss_term
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.gpu.models import DEVICES, ON_GPU, assert_same, batch, gradients, layers

pytestmark = [*ON_GPU, pytest.mark.parametrize("mode", ["except_last", "never"])]


class Penalized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        loss_term("sum", x.square().sum())
        loss_term("mean", x.exp().mean(), reduction="mean")
        return 1 * x  # the next layer may edit it


class Film(nn.Module):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.device)


def balance_for(module: nn.Sequential, stages: int) -> list[int]:
    small, larger = divmod(len(module), stages)
    return [small + (j < larger) for j in range(stages)]


@pytest.mark.parametrize(
    "threads, side",
    [(True, False), (True, True), (False, True)],
    ids=["threads", "threads, side stream", "no threads, side stream"],
)
@pytest.mark.parametrize("devices", DEVICES)
def test_loss_terms_of_all_stages(
    devices: list[str], threads: bool, side: bool, mode: ActivationCheckpointing
) -> None:
    plain = nn.Sequential(*(each for layer in layers() for each in (layer, Penalized())))
    x = batch()
    with collect_loss_terms() as expected:
        y = plain(x)
    (y.square().mean() + expected["sum"] / 50 + expected["mean"]).backward()
    wanted = gradients(plain)
    expected = {name: term.detach() for name, term in expected.items()}
    plain.zero_grad()

    pipeline = GPipe(
        plain,
        balance_for(plain, max(2, len(devices))) if len(devices) > 1 else [6, 6],
        devices=devices,
        chunks=4,
        activation_checkpointing=mode,
        threads=threads,
    )
    try:
        stream = torch.cuda.Stream("cuda:0") if side else torch.cuda.current_stream("cuda:0")
        stream.wait_stream(torch.cuda.current_stream("cuda:0"))
        with torch.cuda.stream(stream):
            with collect_loss_terms() as terms:
                y = pipeline(x)
            assert {str(term.device) for term in terms.values()} == {str(pipeline.devices[-1])}
            (y.square().mean() + terms["sum"] / 50 + terms["mean"]).backward()
            found = gradients(pipeline)
            assert_same({name: term.detach() for name, term in terms.items()}, expected)
            assert_same(found, wanted)
    finally:
        pipeline.close()


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize("devices", DEVICES)
def test_captured_tensors_of_another_device(
    devices: list[str], threads: bool, mode: ActivationCheckpointing
) -> None:
    plain = layers(Film())
    network = nn.Linear(2, 32).double()
    condition = torch.ones(2, dtype=torch.float64)

    def step(module: nn.Module, device: str) -> list[Tensor]:
        network.to(device).zero_grad()
        for film in module.modules():
            if isinstance(film, Film):
                film.scale = network(condition.to(device))
        module(batch()).square().mean().backward()
        return [p.grad.clone() for p in network.parameters() if p.grad is not None]

    expected = step(plain, "cpu"), gradients(plain)
    plain.zero_grad()
    for film in plain.modules():
        if isinstance(film, Film):
            film.scale = film.scale.detach()
    pipeline = GPipe(
        plain,
        balance_for(plain, max(2, len(devices))),
        devices=devices,
        chunks=4,
        activation_checkpointing=mode,
        threads=threads,
    )
    try:
        for home in ("cuda:0", "cpu"):
            outside = step(pipeline, home)
            assert_same((outside, gradients(pipeline)), expected)
            pipeline.zero_grad()
    finally:
        pipeline.close()


class Biased(nn.Module):
    """Computes a bias from its table, keeps it, and uses it again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(0, 1, 8))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = str(x.device)
        if key not in self.kept:
            self.kept[key] = self.table[torch.arange(x.shape[1], device=x.device) // 4].exp()
        return x + self.kept[key]


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize("devices", DEVICES)
def test_tensors_that_layers_use_again(
    devices: list[str], threads: bool, mode: ActivationCheckpointing
) -> None:
    plain = layers(Biased(), nn.Linear(32, 32), Biased())
    kept = [each.kept for each in plain.modules() if isinstance(each, Biased)]
    plain(batch()).square().mean().backward()
    expected = gradients(plain)
    plain.zero_grad()
    pipeline = GPipe(
        plain,
        balance_for(plain, max(2, len(devices))),
        devices=devices,
        chunks=4,
        activation_checkpointing=mode,
        threads=threads,
    )
    try:
        for _ in range(2):
            for each in kept:
                each.clear()
            pipeline(batch()).square().mean().backward()
            assert_same(gradients(pipeline), expected)
            pipeline.zero_grad()
    finally:
        pipeline.close()
