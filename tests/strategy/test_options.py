"""Nothing silent: impossible arguments of GPipeStrategy are refused where it is made."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_gpipe import GPipe, GPipeStrategy

DIVIDED = {"processes": "per_stage", "tensor_parallel": 2}

IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"balance": "even"}, ValueError, "balance must be a list, or one of.*'time'.*got 'even'"),
    ({"balance": "auto"}, ValueError, r"got 'auto'\. To have it measured, write balance='time'"),
    ({"balance": 4}, TypeError, "balance must be a list of ints"),
    ({"balance": []}, ValueError, r"at least one stage: got balance=\[\]"),
    ({"balance": [2, 0]}, ValueError, r"at least one layer.*got balance=\[2, 0\]"),
    ({"balance": [2, -1]}, ValueError, r"got balance=\[2, -1\]"),
    ({"balance": [2, 1.0]}, TypeError, r"ints only.*\(types int, float\)"),
    ({"balance": [2, True]}, TypeError, r"ints only.*\(types int, bool\)"),
    ({"chunks": 0}, ValueError, "chunks must be at least 1.*got 0"),
    ({"chunks": 2.0}, TypeError, "chunks must be an integer.*got 2.0"),
    ({"chunks": True}, TypeError, "chunks must be an integer.*got True"),
    ({"activation_checkpointing": "sometimes"}, ValueError, "'always'.*got 'sometimes'"),
    ({"activation_checkpointing": -1}, ValueError, "0 or more, or a list.*got -1"),
    ({"activation_checkpointing": 1.5}, TypeError, "activation_checkpointing.*got 1.5"),
    ({"schedule": "2f2b"}, ValueError, "schedule must be one of"),
    ({"schedule": [[0, 3], [1]]}, ValueError, r"or a block: .* got \[\[0, 3\], \[1\]\]"),
    ({"schedule": [[0, 3], [1, 3]]}, ValueError, "where B of stage 0 starts at 3 and B of stage 1"),
    ({"schedule": [[0, 3], [1, 2]], "chunks": "auto"}, ValueError, "is not planned"),
    ({"split_backward": "some"}, ValueError, "split_backward must be"),
    ({"processes": "threads"}, ValueError, "processes must be one of 'single'.*got 'threads'"),
    ({"start_method": "thread"}, ValueError, "start_method must be one of 'popen'.*got 'thread'"),
    ({"replicas": 0}, ValueError, "replicas must be a positive integer: got 0"),
    ({"tensor_parallel": 0}, ValueError, "tensor_parallel must be a positive integer: got 0"),
    ({"tensor_parallel": 2}, ValueError, "tensor_parallel=2 with processes='single'. Write"),
    (
        {**DIVIDED, "replicas": 2, "sharding": "optimizer", "outputs": "last", "weights": "host"},
        ValueError,
        "tensor_parallel=2 is for .* got sharding='optimizer', outputs='last', weights='host'",
    ),
    (
        {**DIVIDED, "chunks": "auto", "balance": "time"},
        ValueError,
        "no process can measure its shard alone: got chunks='auto', balance='time'. Write values",
    ),
    ({"deferred_batch_norm": "no"}, TypeError, "must be True or False: got 'no'"),
    ({"save_distributed_checkpoint": 1}, TypeError, "must be True or False: got 1"),
    ({"timeout": 60}, TypeError, "timeout must be a datetime.timedelta: got 60"),
    ({"timeout": timedelta(0)}, ValueError, "timeout must be positive"),
    ({"processes": "per_stage", "lost_after": 10}, TypeError, "timedelta or None: got 10"),
    ({"replicas": 2, "ddp": 1}, TypeError, "ddp must be a dict .* got 1"),
    ({"process_group_backend": 3}, TypeError, "process_group_backend must be the name.*got 3"),
    ({"process_group_backend": "gloo"}, ValueError, "is for several processes.*'gloo'"),
    ({"verify": 1}, ValueError, "verify must be True, False or 'sample': got 1"),
    ({"weights": None}, ValueError, "weights must be 'device' or 'host'.*or 'auto'.*got None"),
    ({"lost_after": timedelta(seconds=2)}, ValueError, "lost_after .*positive.*processes='single'"),
    (
        {"processes": "per_stage", "lost_after": timedelta(0)},
        ValueError,
        "lost_after must be positive",
    ),
]


@pytest.mark.parametrize("arguments, error, message", IMPOSSIBLE, ids=str)
def test_impossible_argument(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GPipeStrategy(**arguments)


@pytest.mark.parametrize("make", [GPipeStrategy, partial(GPipe, nn.Sequential(nn.Tanh()))])
def test_threads_that_are_neither(make: Any) -> None:
    with pytest.raises(ValueError, match="threads must be True, False or 'auto': got 'some'"):
        make([1], threads="some")


@pytest.mark.parametrize(
    "name, way_out",
    [
        ("chunk", "Did you mean chunks?"),
        ("scheduler", "Did you mean schedule?"),
        ("find_unused_parameters", "For replicas, write ddp={'find_unused_parameters': ...};"),
        ("checkpoint", "Did you mean activation_checkpointing?"),
        ("num_microbatches", "Did you mean chunks?"),
        ("offload", "Leave it out."),
    ],
)
def test_argument_that_it_does_not_have(name: str, way_out: str) -> None:
    options: dict[str, Any] = {name: 4}

    with pytest.raises(TypeError, match=f"no argument {name}. {re.escape(way_out)}"):
        GPipeStrategy(**options)
