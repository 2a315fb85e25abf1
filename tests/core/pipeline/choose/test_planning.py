"""Plans for models, and what pipelines make of them.

Here are also the tests of ``choose/options``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpipe import GPipe, MicroBatching, Place, plan
from tests.support.clocks import Between, Clock, Looped, Takes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    made.replace(monkeypatch)
    return made


def layers(clock: Clock, fixed: float = 0.0) -> nn.Sequential:
    return nn.Sequential(*(Takes(clock, 1.0, 2.0, fixed=fixed, width=4) for _ in range(4)))


def test_time_is_predicted_from_what_layers_take(clock: Clock) -> None:
    found = plan(layers(clock), torch.zeros(16, 4), 2).prediction

    assert found.settings.balance == (2, 2)
    assert found.settings.chunks == 16
    assert found.time == pytest.approx((16 + 1) * 6)


def test_each_number_of_micro_batches_is_predicted_by_one_of_its_size(clock: Clock) -> None:
    class Cliff(Takes):
        """Slow with more than 8 rows, as beyond a cache."""

        def pass_time(self, per_row: float, rows: int) -> None:
            super().pass_time(per_row * (10 if rows > 8 else 1), rows)

    model = nn.Sequential(Cliff(clock, 1.0), Cliff(clock, 1.0))

    alone = plan(model, torch.zeros(64, 4), 1, chunks=8).prediction
    assert alone.time == pytest.approx(2 * 64)
    assert plan(model, torch.zeros(64, 4), 1).settings.chunks >= 8


class Sees(Takes):
    """Notes how many rows it gets; more than fit end its forward."""

    def __init__(self, clock: Clock, seen: set[int], fit: float = inf) -> None:
        super().__init__(clock, 1.0)
        self._note, self._fit = seen.add, fit

    def pass_time(self, per_row: float, rows: int) -> None:
        if rows > self._fit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self._note(rows)
        super().pass_time(per_row, rows)


def test_sizes_that_are_measured(clock: Clock) -> None:
    seen: set[int] = set()

    plan(nn.Sequential(Sees(clock, seen), Sees(clock, seen)), torch.zeros(64, 4), 2)

    assert seen == {64, 16, 4, 2}


def test_micro_batches_that_do_not_fit_are_not_measured(clock: Clock) -> None:
    seen: set[int] = set()
    model = nn.Sequential(Sees(clock, seen, fit=4), Sees(clock, seen, fit=4))

    found = plan(model, torch.zeros(64, 4), 2)

    assert seen == {4, 2}
    assert found.prediction.profile.rows == 4


def test_nothing_fits_to_be_measured(clock: Clock) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        plan(nn.Sequential(Sees(clock, set(), fit=0)), torch.zeros(64, 4), 1)


def test_micro_batches_without_known_rows_are_measured_whole(clock: Clock) -> None:
    class Halves(MicroBatching):
        def split(self, batch: Any, chunks: int) -> list[Any]:
            return list(batch.chunk(min(chunks, 2)))

        def merge(self, outputs: Sequence[Any], batch: Any) -> Any:
            return torch.cat(list(outputs))

    seen: set[int] = set()

    plan(nn.Sequential(Sees(clock, seen)), torch.zeros(64, 4), 1, microbatching=Halves())

    assert seen == {64}


def test_fewer_micro_batches_where_each_has_a_fixed_cost(clock: Clock) -> None:
    assert plan(layers(clock, fixed=2.0), torch.zeros(16, 4), 2).settings.chunks < 16


@pytest.mark.parametrize("build", [Between, Looped])
def test_models_of_other_kinds(clock: Clock, build: Any) -> None:
    model = build(*(Takes(clock, 1.0, 2.0) for _ in range(4)))
    path = "blocks" if build is Looped else None

    found = plan(model, torch.zeros(16, 4), 2, module=path, optimizer=torch.optim.Adam)

    assert found.settings.balance == (2, 2)
    assert found.prediction.stages[1].memory.optimizer > 0


def test_auto_chooses_what_the_plan_says(clock: Clock) -> None:
    x = torch.randn(16, 4)
    model = layers(clock)
    expected = model(x)

    piped = GPipe(
        model,
        "time",
        devices=["cpu"] * 2,
        chunks="auto",
        activation_checkpointing="auto",
        sample=x,
    )

    assert piped.plan is not None
    assert (piped.balance, piped.chunks) == ([2, 2], piped.plan.settings.chunks)
    assert piped.activation_checkpointing == "never"
    assert piped.listing().columns[-1].header == "MiB"
    torch.testing.assert_close(piped(x), expected)
    piped.close()


@pytest.mark.parametrize("balance", [[1, 3], "parameters", "memory"])
def test_auto_keeps_a_balance(clock: Clock, balance: Any) -> None:
    x = torch.zeros(16, 4)

    options: dict[str, Any] = {"chunks": "auto", "activation_checkpointing": "never"}
    piped = GPipe(layers(clock), balance, devices=["cpu"] * 2, sample=x, **options)

    assert piped.balance == ([1, 3] if balance == [1, 3] else [2, 2])
    assert piped.chunks == 16
    piped.close()


def test_auto_keeps_chunks(clock: Clock) -> None:
    options: dict[str, Any] = {"chunks": 4, "activation_checkpointing": "auto"}
    piped = GPipe(layers(clock), [2, 2], devices=["cpu"] * 2, sample=torch.zeros(16, 4), **options)

    assert (piped.chunks, piped.activation_checkpointing) == (4, "never")
    piped.close()


def test_auto_without_a_sample(clock: Clock) -> None:
    with pytest.raises(ValueError, match="sample=None"):
        GPipe(layers(clock), [2, 2], devices=["cpu"] * 2, chunks="auto")


def test_auto_without_devices(clock: Clock) -> None:
    with pytest.raises(ValueError, match="devices=None"):
        GPipe(layers(clock), [2, 2], chunks="auto", sample=torch.zeros(16, 4))


def test_auto_of_several_modules(clock: Clock) -> None:
    model = nn.ModuleDict({"a": layers(clock), "b": layers(clock)})

    with pytest.raises(ValueError, match="must be for one pipeline: got 2"):
        GPipe(model, [[2, 2], [2, 2]], module=["a", "b"], chunks="auto", devices=["cpu"] * 2)


def test_other_words_are_refused(clock: Clock) -> None:
    with pytest.raises(TypeError, match="chunks"):
        GPipe(layers(clock), [2, 2], chunks="most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation_checkpointing must be"):
        GPipe(layers(clock), [2, 2], activation_checkpointing="some")  # type: ignore[arg-type]


def test_meta_counts_operations() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    found = plan(model, torch.zeros(16, 8, device="meta"), [Place()] * 2).prediction

    assert found.unit == "FLOP"
    assert found.settings.balance == (2, 2)
    assert sum(stage.time for stage in found.stages) == (3 * 4 - 1) * 16 * 2 * 8 * 8


def test_block_is_not_planned(clock: Clock) -> None:
    block: Any = [[0, 3], [1, 2]]

    with pytest.raises(ValueError, match=r"schedule=\[\[0, 3\], \[1, 2\]\] is not planned"):
        plan(layers(clock), torch.zeros(16, 4), 2, schedule=block)


@pytest.mark.parametrize("name", ["stages", "replicas"])
def test_numbers_that_are_not_positive(clock: Clock, name: str) -> None:
    arguments: dict[str, Any] = {name: 0}

    with pytest.raises(ValueError, match=f"{name} must be 1 or more: got 0"):
        plan(layers(clock), torch.zeros(16, 4), 2, **arguments)
