"""What hooks in blocks collect in a context variable, as those of transformers do."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.pipeline import GPipe
from tests.support.loops import WIDTH, Around, states
from tests.support.models import assert_same_step
from tests.support.pipes import every_mode, with_and_without_threads
from tests.support.waiting import awaited

collector: ContextVar[Any] = ContextVar("collector", default=None)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the variable, where transformers has it."""
    module: Any = SimpleNamespace(_active_collector=collector)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", module)


def collect(key: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = collector.get()
        if found is not None and key in found:
            if key == "hidden_states" and not found[key]:
                found[key].append(args[0])  # as the first hidden state is
            found[key].append(output)

    return hook


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.router.register_forward_hook(collect("logits"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.expert(x) * self.router(x.flatten(0, 1)).softmax(-1)[:, :1].view_as(
            x[..., :1]
        )


class Model(Around):
    """Returns what was collected too, with a loss of it."""

    def __init__(self) -> None:
        super().__init__(block=Routed)
        for block in self.blocks:
            block.register_forward_hook(collect("hidden_states"))

    def forward(self, x: Any, **kwargs: Any) -> Any:
        found: dict[str, list[Tensor]] = {"logits": [], "hidden_states": []}
        token = collector.set(found)
        try:
            y = super().forward(x)
        finally:
            collector.reset(token)
        loss = torch.stack(found["logits"]).softmax(-1).mean((0, 1)).square().sum()
        return {"y": y + loss, **found}


@every_mode
@with_and_without_threads
def test_what_hooks_collect_arrives_with_its_gradients(mode: Any, threads: bool):
    plain = Model()
    pipeline = GPipe(
        copy.deepcopy(plain),
        [2, 1, 1],
        module="blocks",
        devices=["cpu"] * 3,
        chunks=3,
        activation_checkpointing=mode,
        threads=threads,
    )
    for _ in range(2):
        assert_same_step(pipeline, plain, states())
    pipeline.close()


def test_without_a_backward_the_pipeline_is_freed():
    """Once its mini-batch kept what was collected, whose graph leads to the mini-batch."""
    pipeline = GPipe(Model(), [2, 2], module="blocks", devices=["cpu"] * 2, chunks=2)
    for _ in range(2):
        pipeline(states())
    assert pipeline.engine is not None
    engine = weakref.ref(pipeline.engine)

    del pipeline

    assert awaited(lambda: (gc.collect(), engine())[1] is None, True)


def test_nothing_is_collected_where_nothing_is_asked_for():
    plain = Around(block=Routed)
    pipeline = GPipe(copy.deepcopy(plain), [2, 2], module="blocks", devices=["cpu"] * 2, chunks=3)
    assert_same_step(pipeline, plain, states())
    pipeline.close()
