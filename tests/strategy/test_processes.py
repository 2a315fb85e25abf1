"""Which process this is, by what a launcher has told, and over what processes are connected."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
from lightning.pytorch.utilities import rank_zero_only

from lightning_gpipe import GPipeStrategy
from lightning_gpipe.strategy.processes import backend_for
from tests.support.lightning_modules import Classifier, trainer

SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}


def test_task_of_slurm_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (rank_zero_only, rank_zero_of_fabric):
        monkeypatch.setattr(each, "rank", 0)  # which a Trainer sets
    for variable, value in SLURM.items():
        monkeypatch.setenv(variable, value)

    strategy = GPipeStrategy([2, 4], processes="per_stage", replicas=4)
    trainer(tmp_path, strategy, devices=4, num_nodes=2)

    assert type(strategy.cluster_environment).__name__ == "SLURMEnvironment"
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (8, 6, 2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
    assert not strategy.is_global_zero


def test_replicas_that_the_devices_of_a_trainer_do_not_divide_into(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replicas=2, Trainer.devices=3, num_nodes=1"):
        trainer(tmp_path, GPipeStrategy([2, 4], replicas=2), devices=3)


def test_script_that_trains_while_a_spawned_process_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the error was that another program uses the port, which was the main process."""
    # Python sets this in a process that it has spawned, while the main module is imported.
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    strategy = GPipeStrategy([2, 4], processes="per_stage", start_method="spawn")

    with pytest.raises(RuntimeError, match="behind if __name__ == '__main__':"):
        trainer(tmp_path, strategy, devices=2).fit(Classifier())


@pytest.mark.parametrize("nccl", [True, False])
def test_backend_follows_the_devices(monkeypatch: pytest.MonkeyPatch, nccl: bool) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    on_gpus = backend_for(torch.device("cuda", 1))

    assert backend_for(torch.device("cpu")) == "gloo"
    assert on_gpus == ("cpu:gloo,cuda:nccl" if nccl else "gloo")
