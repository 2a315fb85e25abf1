"""Which process has which place, for all ways to run."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpipe.distributed.arrangement import Arrangement


def drawn(
    mode: Any,
    replicas: int,
    nodes: int,
    devices: int,
    last_first: bool = False,
    tensor_parallel: int = 1,
) -> str:
    """A line for each process: its rank, replica, devices, and the workers of its pipeline."""
    found = Arrangement(mode, replicas, nodes, devices, last_first, tensor_parallel)
    on_node = [f"d{k}" for k in range(devices)]
    lines = []
    for rank in range(found.world_size):
        replica = found.replica_of(rank)
        own = "".join(found.of_process(on_node, rank % found.on_each_node))
        workers = "".join(found.of_pipeline(on_node, rank))
        lines.append(f"{rank}: replica {replica}, {own} of {workers}, {found.owners}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("single", 1, 1, 2), "0: replica 0, d0d1 of d0d1, None"),
        (
            ("single", 2, 1, 4),
            "0: replica 0, d0d1 of d0d1, None\n1: replica 1, d2d3 of d2d3, None",
        ),
        (
            ("single", 2, 2, 2),
            "0: replica 0, d0d1 of d0d1, None\n1: replica 1, d0d1 of d0d1, None",
        ),
        (
            ("per_stage", 2, 1, 4),
            "0: replica 0, d0 of d0d1, [0, 1]\n1: replica 0, d1 of d0d1, [0, 1]\n"
            "2: replica 1, d2 of d2d3, [0, 1]\n3: replica 1, d3 of d2d3, [0, 1]",
        ),
        (
            ("per_stage", 1, 2, 1),
            "0: replica 0, d0 of d0d0, [0, 1]\n1: replica 0, d0 of d0d0, [0, 1]",
        ),
        (("per_stage", 2, 2, 1), "0: replica 0, d0 of d0, None\n1: replica 1, d0 of d0, None"),
        (
            ("per_node", 1, 2, 2),
            "0: replica 0, d0d1 of d0d1d0d1, [0, 0, 1, 1]\n"
            "1: replica 0, d0d1 of d0d1d0d1, [0, 0, 1, 1]",
        ),
        (
            ("per_node", 2, 4, 1),
            "0: replica 0, d0 of d0d0, [0, 1]\n1: replica 0, d0 of d0d0, [0, 1]\n"
            "2: replica 1, d0 of d0d0, [0, 1]\n3: replica 1, d0 of d0d0, [0, 1]",
        ),
        (
            ("per_stage", 2, 1, 4, True),
            "0: replica 0, d0 of d1d0, [1, 0]\n1: replica 0, d1 of d1d0, [1, 0]\n"
            "2: replica 1, d2 of d3d2, [1, 0]\n3: replica 1, d3 of d3d2, [1, 0]",
        ),
        (
            ("per_node", 1, 2, 2, True),
            "0: replica 0, d0d1 of d0d1d0d1, [1, 1, 0, 0]\n"
            "1: replica 0, d0d1 of d0d1d0d1, [1, 1, 0, 0]",
        ),
        (
            ("per_stage", 1, 1, 4, False, 2),
            "0: replica 0, d0 of d0d2, [0, 1]\n1: replica 0, d1 of d1d3, [0, 1]\n"
            "2: replica 0, d2 of d0d2, [0, 1]\n3: replica 0, d3 of d1d3, [0, 1]",
        ),
        (
            ("per_stage", 2, 2, 2, False, 2),
            "0: replica 0, d0 of d0, None\n1: replica 0, d1 of d1, None\n"
            "2: replica 1, d0 of d0, None\n3: replica 1, d1 of d1, None",
        ),
        (
            ("per_stage", 1, 1, 4, True, 2),
            "0: replica 0, d0 of d2d0, [1, 0]\n1: replica 0, d1 of d3d1, [1, 0]\n"
            "2: replica 0, d2 of d2d0, [1, 0]\n3: replica 0, d3 of d3d1, [1, 0]",
        ),
    ],
    ids=str,
)
def test_places(arguments: Any, expected: str) -> None:
    assert drawn(*arguments) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("per_stage", 2, 1, 6, False, 2), "got processes='per_stage', tensor_parallel=2, repl"),
        (("per_stage", 3, 1, 4), "got processes='per_stage', replicas=3, Trainer.devices=4"),
        (("per_node", 2, 3, 4), "replicas must divide their number: got replicas=2"),
        (("per_node", 2, 1, 4), "write processes='single'"),
        (("single", 3, 2, 3), "Write num_nodes=1, a multiple"),
        (("single", 2, 1, 3), "equal pipelines: got replicas=2, Trainer.devices=3"),
        (("single", 6, 2, 4), "Write a multiple of 3 as devices"),
        (("single", 1, 2, 3), "or processes='per_stage' for pipelines over machines"),
    ],
)
def test_numbers_that_do_not_divide(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrangement(*arguments)
