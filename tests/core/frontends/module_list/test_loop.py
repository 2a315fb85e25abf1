"""A model whose forward loops over the blocks of an nn.ModuleList, as programs.

Here are also the tests of ``forward_state``, ``forwards`` and ``recording``.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from lightning_gpipe.core.balance import parameter_costs
from lightning_gpipe.core.data import tree_flatten, whole
from lightning_gpipe.core.frontends.module_list.loop import Loop
from tests.support.compilation import has_dynamo
from tests.support.faults import OwnError
from tests.support.interpreter import Interpreter
from tests.support.loops import GPT, LENGTH, WIDTH, looped, states, tokens
from tests.support.models import assert_same_step


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_the_plain_model(stages: int):
    plain = GPT()
    model, run = copy.deepcopy(plain), Interpreter()
    with looped(model, stages=stages, run=run):
        assert_same_step(model, plain, tokens())
    assert len(run.programs) == 1


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
    assert len(set(parameter_costs(loop.unit_modules))) == 1


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


# Ways to loop, and ways to go wrong.


class Looping(nn.Module):
    """Calls its blocks as a test says."""

    def __init__(self, loop: Callable[[nn.ModuleList, Tensor], Any], depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.loop = loop
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.loop(self.blocks, x)


def by_index(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k in range(len(blocks)):
        x = blocks[k](x)
    return x


def by_slices(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks[:2]:
        x = block(x)
    for block in blocks[2:]:
        x = block(x).relu()
    return x


def with_others(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for k, (block, factor) in enumerate(zip(blocks, [1.0, 2.0, 3.0, 4.0], strict=True)):
        x = block(x) * factor + k
    return x


def by_keyword(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(input=x)
    return x


@pytest.mark.parametrize("loop", [by_index, by_slices, with_others, by_keyword])
def test_ways_to_loop(loop: Callable[[nn.ModuleList, Tensor], Any]):
    plain = Looping(loop)
    model = copy.deepcopy(plain)
    with looped(model, stages=3):
        assert_same_step(model, plain, states())


def skipping(k: int) -> Callable[[nn.ModuleList, Tensor], Any]:
    def loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for j, block in enumerate(blocks):
            if j != k:
                x = block(x)
        return x

    return loop


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(block(x))
    return x


def backwards(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in reversed(blocks):
        x = block(x)
    return x


@pytest.mark.parametrize(
    "loop, found",
    [
        (skipping(1), "blocks.2 at .*test_loop.py:.* where blocks.1 is next"),
        (skipping(3), "ended without blocks.3.*layerdrop"),
        (twice, "blocks.0 at .*test_loop.py:.* where blocks.1 is next"),
        (backwards, "blocks.3 at .*test_loop.py:.* where blocks.0 is next"),
        (lambda blocks, x: blocks[1](blocks[0](x)), "ended without blocks.2 to blocks.3"),
        (lambda blocks, x: x, "forward of Looping must call the blocks of module='blocks'"),
        (lambda blocks, x: blocks[0].forward(x), "goes around it"),
    ],
)
def test_loop_that_does_not_call_each_block_once_in_order(
    loop: Callable[[nn.ModuleList, Tensor], Any], found: str
):
    model = Looping(loop)
    with looped(model):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=found):
                model(states())
        model.loop = by_index  # nothing of the loops that failed is left
        model(states())


def test_error_between_blocks_leaves_no_half_recording():
    def broken(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        blocks[0](x)
        raise OwnError

    model = Looping(broken)
    with looped(model):
        with pytest.raises(OwnError):
            model(states())
        with pytest.raises(OwnError):
            model.loop(model.blocks, states())  # without a forward that ends
        model.loop = by_index
        model(states())
        model.loop(model.blocks, states())


def test_error_in_a_block_is_raised_as_it_is():
    class Failing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise OwnError

    model = Looping(by_index)
    model.blocks[2] = Failing(WIDTH, WIDTH)
    with looped(model), pytest.raises(OwnError):
        model(states())


def test_loop_outside_of_a_forward():
    model = Looping(by_index)
    expected = model(states())
    with looped(model):
        for _ in range(2):
            torch.testing.assert_close(model.loop(model.blocks, states()), expected)
        model.loop = twice
        with pytest.raises(RuntimeError, match="blocks.0 at .* where blocks.1 is next"):
            model.loop(model.blocks, states())


def test_two_threads_have_a_recording_each():
    meeting = threading.Barrier(2, timeout=60)

    def meet(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
            meeting.wait()
        return x

    model = Looping(meet)
    batches = [states(seed=k) for k in range(2)]
    expected = [by_index(model.blocks, x) for x in batches]
    with looped(model), ThreadPoolExecutor(2) as pool:
        for found, wanted in zip(pool.map(model, batches), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "state, found",
    [
        (torch.no_grad(), "grad mode from True to False"),
        (torch.autocast("cpu", torch.bfloat16), "autocast from"),
        (torch.autograd.graph.save_on_cpu(), "hooks on saved tensors"),
    ],
)
def test_state_of_the_thread_that_changes_in_the_loop(
    state: AbstractContextManager[Any], found: str
):
    def loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x = blocks[0](x)
        with state:
            x = blocks[1](x)
        return blocks[3](blocks[2](x))

    model = Looping(loop)
    with looped(model), pytest.raises(RuntimeError, match=f"test_loop.py:.*{found}"):
        model(states())


@pytest.mark.parametrize("state", [torch.no_grad(), torch.inference_mode()])
def test_model_without_gradients(state: AbstractContextManager[Any]):
    model = GPT()
    expected = model(tokens())
    with looped(model), state:
        found = model(tokens())
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())


def test_checkpoint_around_blocks_does_no_harm():
    def loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    plain = Looping(loop)
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())


def test_reentrant_checkpoint_around_blocks_is_refused():
    def loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    model = Looping(loop)
    with looped(model), pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(states())


def test_autograd_function_around_each_block_is_refused():
    """Its backward would be lost."""

    class Halved(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
            return block(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0] / 2, None

    def loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = Halved.apply(x, block)
        return x

    model = Looping(loop)
    with looped(model), pytest.raises(RuntimeError, match="grad mode from True to False"):
        model(states())


def test_class_of_blocks_that_overrides_call():
    class Checkpointing(nn.Linear):
        def __call__(self, *args: Any) -> Any:
            return checkpoint(super().__call__, *args, use_reentrant=False)

    plain = Looping(by_index)
    for k in range(4):
        plain.blocks[k] = Checkpointing(WIDTH, WIDTH).double()
    model = copy.deepcopy(plain)
    run = Interpreter()
    with looped(model, run=run):
        assert_same_step(model, plain, states())
        assert "test_loop.py" in run.programs[0].parts[0].steps[0].line


def test_hooks_of_blocks_run_on_micro_batches():
    model = GPT()
    rows: list[int] = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, args: rows.append(args[0].size(0)))
    block.register_forward_hook(lambda module, args, output: output * 2)
    plain = copy.deepcopy(model)
    with looped(model):
        model(tokens())
        rows.clear()
        found = model(tokens())
    assert rows == [3, 2, 2]
    torch.testing.assert_close(found, plain(tokens()))


def test_hooks_on_gradients_of_blocks_run_on_micro_batches():
    model = GPT()
    rows: list[int] = []
    model.blocks[2].register_full_backward_hook(
        lambda module, inputs, outputs: rows.append(len(tree_flatten(outputs).leaves[0]))
    )
    with looped(model):
        model(tokens()).sum().backward()
    assert sorted(rows) == [2, 2, 3]


def test_second_pipeline_of_the_same_blocks():
    model = GPT()
    other = Loop(model, "blocks")
    other.partitions([2, 2])
    with looped(model), pytest.raises(RuntimeError, match="one pipeline at a time: blocks.0"):
        other.install(Interpreter())


def test_two_stacks_of_one_model():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Looping(by_index), Looping(by_slices)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x))

    plain = Two()
    model, one, other = copy.deepcopy(plain), Interpreter(), Interpreter()
    with looped(model, "encoder.blocks", run=one), looped(model, "decoder.blocks", run=other):
        assert_same_step(model, plain, states())
    assert len(one.programs) == len(other.programs) == 1
    assert not [each for each in model.modules() if "_call_impl" in vars(each)]


def test_front_ends_of_two_stacks_are_removed_in_any_order():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (Looping(by_index).blocks for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return by_index(self.other, by_index(self.one, x))

    model = Two()
    loops, runs = [Loop(model, "one"), Loop(model, "other")], [Interpreter(), Interpreter()]
    for loop, run in zip(loops, runs, strict=True):
        loop.partitions([2, 2])
        loop.install(run)
    loops[0].remove()
    model(states())
    assert [len(run.programs) for run in runs] == [0, 1]
    loops[1].remove()
    assert not [each for each in model.modules() if "_call_impl" in vars(each)]


def test_first_block_without_a_tensor():
    model = Looping(lambda blocks, x: blocks[0]("text"))
    with looped(model), pytest.raises(TypeError, match="called with a tensor that has rows"):
        model(states())


@pytest.mark.skipif(not has_dynamo(), reason="torch.compile does not work here")
class Masked(nn.Module):
    """Takes a mask before the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x + mask.softmax(-1) @ self.layer(x)


@pytest.mark.parametrize("marked", [True, False], ids=["whole", "parameter"])
def test_first_tensor_without_rows(marked: bool):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(LENGTH, LENGTH))
            self.blocks = nn.ModuleList(Masked() for _ in range(4))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            mask = whole(self.table * 2) if marked else self.table
            for block in self.blocks:
                x = block(mask, x)
            return x

    plain = Model()
    model = copy.deepcopy(plain)
    with looped(model):
        assert_same_step(model, plain, states())


def test_compiled_model_runs_as_a_pipeline():
    model = Looping(by_index)
    expected = model(states())
    run = Interpreter()
    with looped(model, run=run):
        found = torch.compile(model, backend="eager")(states())
    torch.testing.assert_close(found, expected)
    assert len(run.programs) == 1
