"""Reported: steps that are sampled over processes, which agree on what differs and what fails."""

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lightning.test_verify_over_processes import ByRows
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, Data
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Summed(Classifier):
    """With a loss that is a sum over rows."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")


class Scaling(Classifier):
    """With a first layer whose gradients depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = ByRows(FEATURES, WIDTH).double()


class Demanding(nn.Module):
    """Fails on four rows, as many as a sample has."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four rows")
        return x


class Refusing(Classifier):
    """With a layer that refuses a sample."""

    def __init__(self, layer: int = 0) -> None:
        super().__init__()
        self.layers[layer] = nn.Sequential(self.layers[layer], Demanding())


class RefusingLast(Refusing):
    def __init__(self) -> None:
        super().__init__(5)


class RefusingStep(Classifier):
    """With a step that refuses a sample."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) == 4:
            raise ValueError("four rows")
        return super().training_step(batch, batch_idx)


class RefusingLoss(Classifier):
    """With a loss that refuses a sample."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        y = self(batch[0])
        if len(batch[0]) == 4:
            raise ValueError("four rows")
        return F.cross_entropy(y, batch[1])


def fit(root: Path, model: type[Classifier], outputs: str) -> str:
    """Fit a model; returns the error, or that there is none."""
    strategy = {"schedule": "1f1b", "chunks": 3, "outputs": outputs}
    made = trainer_over(root, "per_stage", [3, 3], strategy, max_epochs=1)
    try:
        made.fit(model(), Data())
    except RuntimeError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize(
    "model, message",
    [
        (Summed, "It is the sum of theirs"),
        (Scaling, "what its layers compute on the whole batch"),
    ],
    ids=["a loss", "a gradient"],
)
def test_difference_ends_the_fit_in_all_processes(
    two_ranks: Pool, tmp_path: Path, model: type[Classifier], message: str, outputs: str
) -> None:
    """Once a process that alone found a difference ran the step again, and the others did not."""
    errors = two_ranks.run(fit, tmp_path, model, outputs)

    assert all(message in error for error in errors), errors


@pytest.mark.parametrize("outputs", ["all", "last"])
@pytest.mark.parametrize(
    "model", [Refusing, RefusingLast, RefusingStep, RefusingLoss], ids=lambda x: x.__name__
)
def test_step_that_fails_on_few_rows_is_not_verified(
    two_ranks: Pool, tmp_path: Path, model: type[Classifier], outputs: str
) -> None:
    assert two_ranks.run(fit, tmp_path, model, outputs) == ["none", "none"]
