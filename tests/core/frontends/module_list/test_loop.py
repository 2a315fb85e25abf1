"""A model whose forward loops over the blocks of an nn.ModuleList, as programs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lightning_gpipe.core.frontends.module_list import Loop
from tests.support.interpreter import Interpreter
from tests.support.loops import GPT, looped, tokens
from tests.support.models import assert_same_step


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_the_plain_model(stages: int):
    plain = GPT()
    model = copy.deepcopy(plain)
    with looped(model, stages=stages) as loop:
        assert_same_step(model, plain, tokens())
        assert loop.runs == 1


def test_hidden_states_are_tensors_with_gradients():
    plain = GPT()
    model = copy.deepcopy(plain)
    with looped(model):
        outputs = [each(tokens(), hidden_states=True)[1] for each in (model, plain)]
    for each in outputs:
        sum(x.square().sum() for x in each).backward()
    assert all(type(x) is Tensor for x in outputs[0])
    torch.testing.assert_close(*outputs)
    for (_, one), (name, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_batches_of_every_size_and_length():
    plain = GPT()
    model = copy.deepcopy(plain)
    with looped(model):
        for rows, length in [(7, 5), (5, 5), (1, 5), (2, 5), (2, 2), (4, 4), (6, 3), (3, 6)]:
            torch.testing.assert_close(model(tokens(rows, length)), plain(tokens(rows, length)))


def test_partitions_are_named_runs_of_blocks():
    loop = Loop(GPT(), "blocks")
    first, second = loop.partitions([3, 1])
    assert loop.units == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert first.names == ("blocks.0", "blocks.1", "blocks.2")
    assert second.titles == ["blocks.3"]
    assert len(set(loop.costs())) == 1


def test_program_has_the_line_and_the_names_of_the_user():
    run = Interpreter()
    model = GPT()
    with looped(model, run=run):
        model(tokens())
    step = run.programs[0].parts[1].steps[-1]
    assert step.name == "blocks.3"
    assert "loops.py:" in step.line


def test_copy_and_pickle_are_plain_models():
    model = GPT()
    run = Interpreter()
    with looped(model, run=run):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies.append(copy.deepcopy(copies[0]))
        for each in copies:
            torch.testing.assert_close(each(tokens()), model(tokens()))
            assert each.state_dict().keys() == model.state_dict().keys()
    assert len(run.programs) == len(copies)  # those of the model itself


def test_removed_front_end_leaves_the_model_as_it_was():
    model = GPT()
    before = {name: dict(vars(each)) for name, each in model.named_modules()}
    run = Interpreter()
    with looped(model, run=run):
        pass
    assert {name: dict(vars(each)) for name, each in model.named_modules()} == before
    model(tokens())
    assert not run.programs


def test_calls_in_a_plain_block_run_as_they_are():
    model = GPT()
    run = Interpreter()
    with looped(model, run=run) as loop, loop.plain():
        model(tokens())
    assert not run.programs
