"""A case ends as the same, as refused, or as a failure, and the next one is tried in any case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models import libraries
from tests.models.case import ROWS, Case
from tests.models.settings import FEW, SOME, settings_of
from tests.models.trial import attempt

F64 = torch.float64


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input": torch.randn(ROWS, 4, generator=generator)}


class Odd(nn.Module):
    """Layers, and between them what a test says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        x = self.second(self.first(input))
        if self.kind == "across rows":
            x = x - x.mean(0)
        if self.kind == "raises in training" and self.training:
            raise KeyError("lost")
        return self.third(x)


def a_case(kind: str, refused: str | None = None, *, large: bool = False) -> Case:
    return Case(kind, lambda: Odd(kind), rows, refused=refused, dtype=F64, large=large)


def test_same_model() -> None:
    trial = attempt(a_case("plain"), FEW)

    assert (trial.passed, trial.refusal, trial.settings) == (True, "", 3)


def test_model_that_is_refused_as_expected() -> None:
    trial = attempt(a_case("across rows", refused="across the rows"), FEW)

    assert trial.passed
    assert trial.settings == 1
    assert "across the rows" in trial.refusal


@pytest.mark.parametrize(
    "kind, refused, what",
    [
        ("across rows", "no such words", "across the rows"),
        ("plain", "refused", "is not refused with 'refused'"),
    ],
)
def test_refusal_that_is_none(kind: str, refused: str, what: str) -> None:
    trial = attempt(a_case(kind, refused), FEW)

    assert not trial.passed
    assert what in trial.failures[0].what


def test_failure_of_some_settings() -> None:
    trial = attempt(a_case("raises in training"), FEW)

    assert [each.setting.training for each in trial.failures] == [True, False, True]
    assert "KeyError" in trial.failures[0].what


def test_settings_of_a_large_case_and_of_a_short_run() -> None:
    assert settings_of(a_case("plain", large=True), SOME) == FEW
    assert settings_of(a_case("plain"), SOME) == SOME
    assert len(settings_of(a_case("plain"), SOME, 1)) == 1
    assert len(settings_of(a_case("plain"), SOME, 3)) == 3


def test_libraries_by_name() -> None:
    assert [each.name for each in libraries.chosen([])] == libraries.NAMES
    assert [each.name for each in libraries.chosen(["timm"])] == ["timm"]
    assert [each.packages for each in libraries.chosen(["timm"])] == [["torch", "timm"]]
    assert [each.packages for each in libraries.chosen(["guide"])] == [["torch"]]
    assert next(libraries.chosen(["guide"])).cases


def test_library_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"libraries are transformers, .* got 'keras'"):
        libraries.chosen(["keras"])
