"""Same numbers: models that loop over blocks, over processes and over threads."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpipe import GPipe
from tests.support.language_models import LENGTH, llama, t5
from tests.support.loops import GPT, tokens
from tests.support.processes import Owners, assert_equal, processes, values
from tests.support.ranks import Pool
from tests.support.two_stacks import Stacks

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def logits(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What a model of transformers returns, with the states between its blocks."""
    found = model(input_ids=x, labels=x, output_hidden_states=True)
    return [found.loss, found.logits, *found.get("hidden_states", ())]


def gpt(model: nn.Module, x: Tensor) -> list[Tensor]:
    found, states = model(x, hidden_states=True)
    return [found, *states]


def stacks(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [model(x.double())]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]], Any, Any]] = {
    "gpt": (GPT, gpt, "blocks", [1, 2, 1]),
    "two stacks": (Stacks, stacks, ["encoder", "decoder"], [[1, 1, 1], [1, 2, 1]]),
    "llama": (llama, logits, "model.layers", [1, 2, 1]),
    "t5": (t5, logits, ["encoder.block", "decoder.block"], [[1, 1, 1], [1, 2, 1]]),
}


def train(name: str, owners: Owners | None) -> tuple[Any, dict[str, Tensor], Tensor]:
    """What came of three steps and an evaluation after each; the parameters; a random number."""
    make, call, path, balance = MODELS[name]
    torch.manual_seed(4)
    pipeline = GPipe(
        make().double(),
        balance,
        module=path,
        devices=["cpu"] * (3 if owners is None else len(owners)),
        chunks=3,
        **processes(owners),
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), 0.01)
    found = []
    for k, rows in enumerate((7, 7, 2)):
        x = tokens(rows, LENGTH, seed=k)
        pipeline.train()
        outputs = call(pipeline, x)
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pipeline.eval()
        with torch.no_grad():
            found.append((loss.detach(), [x.detach() for x in outputs], call(pipeline, x[1:])))
    pipeline.close()
    return found, values(pipeline.state_dict()), torch.rand(())


CASES = [
    ("gpt", (0, 1, 2)),
    ("gpt", (0, 0, 1)),
    ("two stacks", (1, 0, 1)),
    ("llama", (0, 1, 2)),
    ("t5", (1, 0, 1)),
]


@pytest.mark.parametrize("name, owners", CASES, ids=str)
def test_steps_and_evaluations(four_ranks: Pool, name: str, owners: Owners) -> None:
    with torch.random.fork_rng(devices=[]):
        steps, parameters, number = train(name, None)

    found = four_ranks.run(train, name, owners, among=len(set(owners)))

    for other_steps, other_parameters, other_number in found:
        assert_equal((other_steps, other_number), (steps, number))
        assert_equal(other_parameters, {name: parameters[name] for name in other_parameters})
    assert set(parameters) == set(chain.from_iterable(each for _, each, _ in found))


def generated(owners: Owners | None, *, use_cache: bool) -> Any:
    torch.manual_seed(4)
    model: Any = llama().double().eval()
    pipeline = GPipe(model, [2, 2], module="model.layers", devices=["cpu"] * 2, **processes(owners))
    x = tokens(2, LENGTH, seed=1)
    mask = torch.ones_like(x)
    try:
        return model.generate(x, attention_mask=mask, max_new_tokens=4, use_cache=use_cache)
    except RuntimeError as error:
        return str(error)
    finally:
        pipeline.close()


def test_generation(four_ranks: Pool) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = generated(None, use_cache=False)

    for found in four_ranks.run(partial(generated, use_cache=False), (0, 1), among=2):
        assert_equal(found, expected)


def test_cache_that_blocks_of_several_processes_fill_is_refused(four_ranks: Pool) -> None:
    found = four_ranks.run(partial(generated, use_cache=True), (0, 1), among=2)

    for each in found:
        assert "an object that blocks fill must be in one process" in each


class Uneven(nn.Module):
    """One process keeps a value between blocks that the others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == torch.distributed.get_rank():
                self.kept.append(x)
        return x


def told_of_uneven() -> str:
    pipeline = GPipe(Uneven(), [2, 2], module="blocks", devices=["cpu"] * 2, **processes((0, 1)))
    try:
        pipeline(torch.ones(3, 4))
    except RuntimeError as error:
        return str(error)
    finally:
        pipeline.close()
    return "none"


def test_forwards_that_differ_between_processes_are_refused(four_ranks: Pool) -> None:
    found = four_ranks.run(told_of_uneven, among=2)

    assert any("must run the same mini-batches" in each for each in found), found
    assert all("rank" in each for each in found), found
