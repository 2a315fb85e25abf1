"""A plan for replicas counts the bytes that they have, whatever they divide.

How much is there at the peak of a backward is measured in `test_cuda_sharded_parameters.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.layout import SHARDINGS
from lightning_gpipe.core.planner.predicted_stage import HeldShares, Memory
from tests.lightning import test_sharded_gradients
from tests.lightning.test_sharded_gradients import PLACES, Rows
from tests.support.lightning_modules import Classifier
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Bytes(NamedTuple):
    """Those of parameters, gradients and optimizer states."""

    parameters: float
    gradients: float
    optimizer: float


def fit(root: Path, place: str, sharding: Any) -> tuple[Bytes, Bytes, Any]:
    """The bytes of this process between steps, those that its plan predicts, and its settings."""
    processes, machines, _ = PLACES[place]
    strategy = {"replicas": 2, "chunks": "auto", "sharding": sharding, "verify": False}
    record = test_sharded_gradients.Memory()
    options = {"callbacks": [record], "max_epochs": 1}
    made = trainer_over(root, processes, [3, 3], strategy, machines, **options)
    found: dict[str, Any] = {}

    class Planned(Classifier):
        def on_train_start(self) -> None:
            assert isinstance(self.trainer.strategy, GPipeStrategy)
            pipeline = self.trainer.strategy.pipeline
            assert pipeline is not None and pipeline.plan is not None
            found["plan"], found["here"] = pipeline.plan, pipeline.layout.workers_here

    made.fit(Planned("adam"), datamodule=Rows(2))
    prediction, settings = found["plan"].prediction, found["plan"].settings
    layers = [prediction.profile.layers[3 * j + k] for j in found["here"] for k in range(3)]
    shares = HeldShares.of_stages(settings, 2), HeldShares.around_stages(settings, 2)
    # Gradients around the stages, too, are divided once a backward has ended.
    around = shares[1]._replace(gradients=shares[0].gradients)
    sizes = Memory.of(layers).divided(shares[0])
    outside = Memory.of([prediction.profile.around]).divided(around)
    planned = Bytes(*(a + b for a, b in zip(sizes[:3], outside[:3], strict=True)))
    measured = Bytes(sum(record.parameters), record.gradients[-1], record.states)
    return measured, planned, (settings.sharding, prediction.replicas)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("place", ["2x1", "2x2"])
def test_bytes_between_steps(
    tmp_path: Path, two_ranks: Pool, four_ranks: Pool, place: str, sharding: Any
) -> None:
    pool = two_ranks if place == "2x1" else four_ranks
    found = pool.run(fit, tmp_path, place, sharding)

    for k in range(len(found) // 2):  # the replicas of the same stages
        group = found[k :: len(found) // 2]
        assert {settings for *_, settings in group} == {(sharding, 2)}
        for kind in Bytes._fields:
            measured, planned = ([getattr(x[i], kind) for x in group] for i in (0, 1))
            # A share has whole parameters, of which the largest has 64 elements of 8 bytes.
            tolerance = 0 if sharding is None else 64 * 8 * (2 if kind == "optimizer" else 1)
            assert abs(measured[0] - measured[1]) <= tolerance
            assert sum(measured) == pytest.approx(sum(planned), abs=2 * 8 * 8)
