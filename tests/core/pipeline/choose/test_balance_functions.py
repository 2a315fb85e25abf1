import pytest
import torch
from torch import nn

from lightning_gpipe.core.pipeline.choose.balance_functions import (
    balance_by_memory,
    balance_by_parameters,
)


def test_balance_by_parameters() -> None:
    big, small = nn.Linear(40, 40), [nn.Linear(20, 20) for _ in range(4)]

    assert balance_by_parameters(nn.Sequential(big, *small), stages=2) == [1, 4]
    assert balance_by_parameters(nn.Sequential(*small, nn.ReLU(), nn.ReLU()), stages=2) == [2, 4]
    assert balance_by_parameters(nn.Sequential(*small), stages=1) == [4]


def test_balance_by_parameters_of_a_model_without_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(4)))

    assert balance_by_parameters(module, stages=2) == [2, 2]


@pytest.mark.parametrize("stages", [0, 3])
def test_balance_by_parameters_over_too_few_or_many_stages(stages: int) -> None:
    with pytest.raises(ValueError, match=f"got {stages} stages for the 2 layers of module"):
        balance_by_parameters(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stages)


def test_balance_by_parameters_of_what_cannot_be_cut() -> None:
    with pytest.raises(TypeError, match="module must be an nn.Sequential"):
        balance_by_parameters(nn.Linear(2, 2), 1)  # type: ignore[arg-type]  # the fault under test


def test_memory_with_a_unit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a number of bytes.*got '1GB'\. Write 24"):
        balance_by_memory(
            nn.Sequential(nn.Linear(2, 2)),
            1,
            torch.zeros(2, 2),
            device_memory="1GB",  # type: ignore[arg-type]  # the fault under test
        )
