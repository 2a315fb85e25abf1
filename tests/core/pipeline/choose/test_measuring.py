"""Balances by time and by memory, of any model.

Here are also the tests of ``sampling``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe, balance_by_memory, balance_by_time
from tests.support.clocks import Between, Clock, Looped, Takes
from tests.support.two_stacks import Stacks

WIDTH = 4
KINDS: dict[str, Any] = {
    "sequential": (lambda *layers: nn.Sequential(*layers), None),
    "blocks": (Looped, "blocks"),
    "traced": (Between, None),
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.replace(monkeypatch)
    return clock


def batch(rows: int = 8) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_slowest_stage_is_as_fast_as_possible(kind: str, clock: Clock) -> None:
    build, path = KINDS[kind]
    layers = [Takes(clock, time, width=9 - k) for k, time in enumerate([1, 1, 1, 1, 4, 1])]
    model = build(*layers)

    found = balance_by_time(model, 2, batch(), module=path, chunks=2)
    with_balance = GPipe(model, "time", module=path, devices=["cpu"] * 2, sample=batch())

    assert found == [4, 2]
    assert with_balance.balance == [4, 2]
    with_balance.close()


def test_balance_needs_micro_batches_of_one_size(clock: Clock) -> None:
    """Once half of their rows were measured, too, which only a plan needs."""
    rows: set[int] = set()

    class Counts(Takes):
        def forward(self, x: Tensor) -> Tensor:
            rows.add(len(x))
            return super().forward(x)

    layers = nn.Sequential(*(Counts(clock, 1.0) for _ in range(4)))
    pipeline = GPipe(layers, "time", devices=["cpu"] * 2, chunks=2, sample=batch())
    found = balance_by_time(layers, 2, batch(), chunks=2)
    pipeline.close()

    assert pipeline.balance == found == [2, 2]
    assert rows == {4}


def test_backward_and_recomputation_count(clock: Clock) -> None:
    layers = nn.Sequential(Takes(clock, 2.0), Takes(clock, 2.0), Takes(clock, 1.0, 3.0))
    options: Any = {"stages": 2, "sample": batch(), "chunks": 2}

    kept = balance_by_time(layers, **options, activation_checkpointing="never")
    dropped = balance_by_time(layers, **options, activation_checkpointing="always")

    assert (kept, dropped) == ([2, 1], [1, 2]) or kept == dropped == [2, 1]
    # 2 + 2 | 4 and, with each forward twice, 4 + 4 | 5
    assert kept == [2, 1]


class Two(nn.Module):
    """Two modules of equal layers, of which the first computes in forward only."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        times = (4.0, 0.0), (0.0, 5.0), (0.0, 6.0)
        self.a, self.b = (nn.Sequential(*(Takes(clock, *t) for t in times)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def test_recomputation_in_each_stage_of_a_chain(clock: Clock) -> None:
    """Once a list for all stages of a chain raised an error of zip."""
    options: Any = {"module": ["a", "b"], "chained": True, "devices": ["cpu"] * 2, "chunks": 2}
    options |= {"sample": batch(), "activation_checkpointing": [0, 0, 2, 2]}

    model = GPipe(Two(clock), "time", **options)

    # 4 + 5 | 6 and, with each forward twice, 8 | 5 + 6
    assert model.balances == [[2, 1], [1, 2]]
    model.close()


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_recomputation_in_another_number_of_stages(clock: Clock, balance: str) -> None:
    layers = nn.Sequential(*(Takes(clock, 1.0) for _ in range(4)))

    with pytest.raises(ValueError, match=r"for each stage: got 1 number, \[2\], for 2 stages"):
        GPipe(layers, balance, devices=["cpu"] * 2, sample=batch(), activation_checkpointing=[2])


def test_what_is_around_does_not_count_for_time(clock: Clock) -> None:
    class Model(Looped):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 100.0
            return super().forward(x)

    model = Model(*(Takes(clock, 1.0) for _ in range(4)))

    assert balance_by_time(model, 2, batch(), module="blocks") == [2, 2]


def test_memory_counts_parameters_gradients_and_state_of_the_optimizer() -> None:
    layers = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh()
    )

    found = balance_by_memory(layers, 2, batch(), optimizer=torch.optim.Adam)

    assert found == [1, 5]


def test_memory_counts_what_is_saved() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(6)))
    many = batch(rows=64)
    options: Any = {"stages": 2, "sample": many, "chunks": 16}

    kept = balance_by_memory(layers, **options, activation_checkpointing="never")

    assert kept == [4, 3]  # four outputs and the input, three outputs and the boundary


def test_memory_counts_what_is_around_on_its_device() -> None:
    model = Looped(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model.leave = nn.Linear(WIDTH, 16)  # as many parameters as four blocks

    assert balance_by_memory(model, 2, batch(1), module="blocks") == [5, 1]


@pytest.mark.parametrize("limits, expected", [([1e9, 1e9], [2, 2]), ([1e9, 3000], [3, 1])])
def test_stages_fit_the_memory_of_their_devices(
    clock: Clock, limits: list[float], expected: list[int]
) -> None:
    layers = nn.Sequential(*(Takes(clock, 1.0, width=256) for _ in range(4)))

    assert balance_by_time(layers, 2, batch(), device_memory=limits) == expected


def test_too_little_memory_is_refused(clock: Clock) -> None:
    layers = nn.Sequential(*(Takes(clock, 1.0, width=2**20) for _ in range(4)))

    with pytest.raises(ValueError, match=r"nearest one, \[2, 2\], lacks 0.0146 GiB on stage 0"):
        balance_by_time(layers, 2, batch(), device_memory=2**20)


def test_model_that_has_no_values_yet_is_counted() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        )

    assert balance_by_time(layers, 2, batch()) == [2, 1]
    assert balance_by_memory(layers, 2, batch()) == [2, 1]


def test_several_modules() -> None:
    model = Stacks()
    paths = ["encoder", "decoder"]

    piped = GPipe(model, "memory", module=paths, devices=["cpu"] * 2, sample=torch.zeros(4, 6))

    assert [len(each) for each in piped.balance] == [2, 2]
    assert len(piped.profiles) == 2
    assert {each.around.parameters for each in piped.profiles} == {
        sum(p.numel() for p in model.enter.parameters())
    }
    piped.close()


def test_stages_are_listed_with_what_they_cost(clock: Clock) -> None:
    layers = nn.Sequential(Takes(clock, 0.5), Takes(clock, 0.25, 0.25))

    piped = GPipe(layers, "time", devices=["cpu"] * 2, chunks=2, sample=batch())

    listing = piped.listing()
    assert [str(column.header) for column in listing.columns][-2:] == ["ms", "MiB"]
    # 4 rows in 2 micro-batches, of which one is recomputed
    assert list(listing.columns[-2].cells) == ["6,000.00", "5,000.00"]
    piped.close()


def test_balance_that_was_given_lists_no_costs() -> None:
    piped = GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 1], devices=["cpu"] * 2)

    assert piped.profiles == []
    assert str(piped.listing().columns[-1].header) == "share"
    piped.close()


def test_pipeline_trains_as_with_the_same_balance_as_a_list() -> None:
    def trained(balance: Any, **options: Any) -> tuple[list[int], list[Tensor]]:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), nn.Tanh()]
        piped = GPipe(nn.Sequential(*layers), balance, devices=["cpu"] * 2, chunks=2, **options)
        piped(batch()).sum().backward()
        piped.close()
        found = [*piped.parameters(), *piped.buffers()]
        return piped.balance, found + [p.grad for p in piped.parameters() if p.grad is not None]

    balance, measured = trained("time", sample=batch())

    assert all(map(torch.equal, measured, trained(balance)[1]))


# What is refused.


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_sample_is_needed(kind: str) -> None:
    with pytest.raises(ValueError, match="got sample=None. Write sample=x"):
        GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), kind, devices=["cpu"] * 2)


@pytest.mark.parametrize("kind", ["parameters", "time", "memory"])
def test_devices_are_needed(kind: str) -> None:
    with pytest.raises(ValueError, match=f"balance='{kind}' gives each device a stage"):
        GPipe(nn.Sequential(nn.Tanh(), nn.Tanh()), kind, sample=batch())


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages"):
        balance_by_time(nn.Sequential(nn.Tanh(), nn.Tanh()), 3, batch())


def test_memory_of_another_number_of_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 for 2 stages"):
        balance_by_time(
            nn.Sequential(nn.Tanh(), nn.Tanh()), 2, batch(), device_memory=[1.0, 1.0, 1.0]
        )
