"""Blocks that are compiled, have hooks, or are frozen in part run as they do in the plain model."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.module_list.blocks import Block
from tests.support.compilation import has_dynamo
from tests.support.interpreter import Interpreter
from tests.support.loops import Around, looped, states
from tests.support.models import assert_same_step


@pytest.mark.skipif(not has_dynamo(), reason="torch.compile does not work here")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_blocks(in_place: bool):
    plain = Around(depth=2)
    model = copy.deepcopy(plain)
    for k, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="eager")
        else:
            compiled: Any = torch.compile(block, backend="eager")
            model.blocks[k] = compiled
    run = Interpreter()
    with looped(model, run=run):
        torch.testing.assert_close(model(states()), plain(states()))
    assert len(run.programs) == 1


def test_hooks_of_blocks_run_for_each_micro_batch():
    def doubled(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0] * 2,)

    def shifted(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rows.append(len(output))
        return output + 1

    rows: list[int] = []
    plain = Around(depth=2)
    for block in plain.blocks:
        block.register_forward_pre_hook(doubled)
        block.register_forward_hook(shifted)
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())
    assert (rows.count(7), rows.count(3)) == (2, 2)  # of the plain model; of micro-batches


@pytest.mark.parametrize("frozen", [[0], [1, 2], [3], [0, 1, 2, 3]])
def test_blocks_that_are_frozen(frozen: list[int]):
    plain = Around()
    for k in frozen:
        plain.blocks[k].requires_grad_(False)
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())


def test_kind_of_a_block_is_of_its_classes_and_its_flags_as_they_are_now():
    def block(index: int) -> Block:
        module: Any = nn.Linear(2, 2)
        module.index, module.cached, module.name = index, None, "a"
        return Block(module, index, f"blocks.{index}", 0, None)

    one, other = block(0), block(1)
    module: Any = one.module
    assert one.kind == other.kind
    changes: list[tuple[str, Any]] = [
        ("training", False),
        ("cached", torch.zeros(2)),
        ("cached", False),
        ("name", "b"),
        ("added", True),
    ]
    for name, value in changes:
        before = one.kind
        setattr(module, name, value)
        assert one.kind != before
        setattr(other.module, name, value)
        assert one.kind == other.kind
    del module.added
    assert one.kind != other.kind
    other.module.__dict__.pop("added")
    assert one.kind == other.kind
    module.index = 7
    assert one.kind == other.kind
    module.__class__ = nn.Bilinear
    assert one.kind != other.kind


def test_kind_of_a_block_is_of_the_sizes_of_its_layers():
    def block(index: int, layer: nn.Module) -> Block:
        module: Any = nn.Sequential(layer)
        module[0].layer_index = index
        return Block(module, index, f"blocks.{index}", 0, None)

    layers = [
        nn.Linear(6, 6),
        nn.Linear(6, 12),
        nn.Conv2d(6, 6, 1, padding=1),
        nn.Conv2d(6, 6, 1, padding=1, stride=2),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=3),
    ]
    kinds = [block(k, layer).kind for k, layer in enumerate(layers)]
    assert len(set(kinds)) == len(kinds)
    assert kinds == [block(k, copy.deepcopy(layer)).kind for k, layer in enumerate(layers)]
    assert block(7, nn.Linear(6, 6)).kind == kinds[0]


def test_block_keeps_nothing_that_its_module_has_dropped():
    class Kept:
        pass

    module: Any = nn.Linear(2, 2)
    module.kept = Kept()
    block = Block(module, 0, "blocks.0", 0, None)
    before, dropped = block.kind, weakref.ref(module.kept)
    module.kept = Kept()
    assert block.kind == before
    assert dropped() is None


def test_kind_of_a_block_whose_attributes_a_worker_sets() -> None:
    """Once this ended a fit under 1F1B now and then: "dictionary changed size during iteration"."""
    module = nn.Linear(3, 3)
    block = Block(module, 0, "0", 0, None)
    stop = threading.Event()

    def work() -> None:
        for k in itertools.cycle(range(50)):
            setattr(module, f"kept_{k}", [])
            delattr(module, f"kept_{k}")
            if stop.is_set():
                return

    worker = threading.Thread(target=work, name="worker")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    worker.start()
    try:
        assert len({block.kind for _ in range(2000)}) == 1
    finally:
        stop.set()
        worker.join()
        sys.setswitchinterval(interval)
