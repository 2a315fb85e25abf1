"""Parameters that forward edits: frozen ones are found, restored and lent to a recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_gpipe.core.faithful.journal import Journal
from lightning_gpipe.core.faithful.managers import Manager, together
from lightning_gpipe.core.faithful.state import parameters
from lightning_gpipe.core.faithful.state.parameters import ParameterState, parameters_preserved


def layer(*, trained: bool) -> nn.Linear:
    made = nn.Linear(2, 2).requires_grad_(trained)
    with torch.no_grad():
        made.weight.fill_(1.0)
    return made


def edit(layer: nn.Linear) -> None:
    layer.weight.data.mul_(3)  # which leaves no version behind


def swapped_in(state: ParameterState) -> Manager:
    return together(list(state.swapped_in(Journal())))


def test_first_run_finds_the_frozen_parameters_that_it_edits() -> None:
    frozen, other = layer(trained=False), layer(trained=False)
    state = ParameterState([frozen, other], None)

    edit(frozen)

    assert state.compare() == {(frozen, "weight")}


def test_values_of_before_are_restored() -> None:
    frozen = layer(trained=False)
    state = ParameterState([frozen], frozenset({(frozen, "weight")}))

    edit(frozen)
    state.restore()

    assert torch.equal(frozen.weight, torch.ones(2, 2))


def test_recomputation_edits_a_copy_from_before_the_forward() -> None:
    frozen = layer(trained=False)
    state = ParameterState([frozen], None)
    edit(frozen)
    state.compare()
    weight = frozen.weight

    with swapped_in(state):
        before = frozen.weight.clone()
        edit(frozen)

    assert torch.equal(before, torch.ones(2, 2))
    assert frozen.weight is weight
    assert torch.equal(weight, torch.full((2, 2), 3.0))


def test_trained_parameter_that_a_second_edit_changes() -> None:
    trained = layer(trained=True)
    state = ParameterState([trained], None)
    edit(trained)
    assert state.compare() == frozenset()

    second = pytest.raises(RuntimeError, match="Linear must not edit its parameter 'weight'")
    with second, swapped_in(state):
        edit(trained)
    with swapped_in(state):
        trained.weight.data.clamp_(max=27.0)  # as it is


def test_more_frozen_parameters_than_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_MOST", 8)
    frozen = layer(trained=False)
    state = ParameterState([frozen], None)
    edit(frozen)

    with pytest.raises(RuntimeError, match="Linear must not edit its frozen parameter 'weight'"):
        state.compare()


def test_all_parameters_are_preserved() -> None:
    frozen, trained, replaced = layer(trained=False), layer(trained=True), layer(trained=True)
    own = replaced.weight.data_ptr()

    with parameters_preserved([frozen, trained, replaced]):
        edit(frozen)
        edit(trained)
        replaced.weight.data = torch.zeros(2, 2)

    assert all(torch.equal(x.weight, torch.ones(2, 2)) for x in (frozen, trained, replaced))
    assert replaced.weight.data_ptr() == own


def test_parameter_that_is_too_large_to_be_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_MOST", 8)
    trained = layer(trained=True)

    refused = pytest.raises(RuntimeError, match="got an edit of 'weight' of Linear")
    with refused, parameters_preserved([trained]):
        edit(trained)
