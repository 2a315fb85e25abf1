"""No hang: an error caught in one process ends that step in all, which continue."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gpipe import OutOfStep, RankFailed
from tests.support.faults import OwnError
from tests.support.lightning_modules import FEATURES, WIDTH, Classifier, Data
from tests.support.ranks import new_ranks
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

AT = 1  # the step in which it fails


class Body(nn.Module):
    """A loop over blocks, or a forward that is traced, in which one process may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(FEATURES if k == 0 else WIDTH, WIDTH) for k in range(4)
        )
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == 1 and self.fails == "own error":
                raise OwnError("burnt")
            if k == 1 and self.fails == "refused" and x.sum() > 0:
                return x
        return x


class Chain(nn.Module):
    """The same layers one by one, which is traced; another flag is another trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails == "own error":
            raise OwnError("burnt")
        if self.fails == "refused" and x.sum() > 0:
            return x
        return self.second(x)


class Catching(Classifier):
    """Leaves out the layers in a step in which they fail."""

    body: Body | Chain

    def __init__(self, body: Body | Chain, fails: str) -> None:
        super().__init__(layers=nn.Sequential())
        self.body = body
        self.double()
        self.fails = fails
        self.caught: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.body.fails = self.fails if (batch_idx, dist.get_rank()) == (AT, 1) else ""
        try:
            x = self.body(x)
        except Exception as error:
            self.caught.append(f"{batch_idx}: {type(error).__name__}: {error}")
            x = x.new_ones(len(x), WIDTH)
        return nn.functional.cross_entropy(self.head(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def fit(root: Path, kind: str, fails: str) -> tuple[list[str], int]:
    """What a fit has caught, and how many steps it has made."""
    blocks = kind == "blocks"
    module, balance = ("body.blocks", [2, 2]) if blocks else ("body", [1, 1])
    model = Catching(Body() if blocks else Chain(), fails)
    strategy = {"module": module, "lost_after": timedelta(seconds=20)}
    made = trainer_over(root, "per_stage", balance, strategy, max_epochs=1)
    made.fit(model, datamodule=Data())
    return model.caught, made.global_step


@pytest.mark.parametrize("kind", ["blocks", "traced"])
@pytest.mark.parametrize("fails", ["own error", "refused"])
def test_error_that_a_step_catches_ends_that_step_of_all(
    tmp_path: Path, kind: str, fails: str
) -> None:
    """Once the others waited for its stages, and it for their next batch."""
    with new_ranks(2) as ranks:
        (other, steps), (own, own_steps) = ranks.run(fit, tmp_path, kind, fails)

    assert steps == own_steps == 3
    assert len(own) == len(other) == 1
    assert own[0].startswith(f"{AT}: ")
    if kind == "blocks" and fails == "refused":  # rank 1 ran other blocks
        assert other[0].startswith(f"{AT}: {OutOfStep.__name__}: ")
    else:
        assert other[0].startswith(f"{AT}: {RankFailed.__name__}: rank 1 (stage 1) failed: ")
    assert ("burnt" in other[0]) == (fails == "own error")
