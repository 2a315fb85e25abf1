"""Same numbers: several processes compute the same as one, to the bit.

Here are also the tests of ``process_group/transport``, ``agreement`` and ``shared_parameters``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import GPipe
from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.drawn import pipe
from tests.support.grammar import Case, Model, Passing, Step, cases, models
from tests.support.loops import TOKENS, tokens
from tests.support.processes import Owners, assert_equal, processes, values
from tests.support.ranks import Pool
from tests.support.traced_models import Encoder

OWNERS: dict[int, list[Owners]] = {  # by the number of workers
    2: [(0, 1)],
    3: [(0, 1, 2), (0, 0, 1), (1, 0, 1)],
    4: [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1)],
}

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Sums over normalised rows are the same without being functions of weights.
    pytest.mark.filterwarnings("ignore:the loss term .sum. is the same for all micro-batches"),
]


def run_case(case: Case, owners: Owners | None = None) -> tuple[list[dict[str, Any]], Tensor]:
    """What came of each step, and the next random number."""
    torch.manual_seed(case.seed)
    records = pipe(case, case.build(), **processes(owners))
    return [record._asdict() for record in records], torch.rand(())


def here(record: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """What of ``record`` one of several processes has too."""
    return {
        **record,
        "gradients": {name: record["gradients"].get(name) for name in like["gradients"]},
        "buffers": {name: record["buffers"][name] for name in values(like["buffers"])},
        "hooks": {name: record["hooks"].get(name) for name in like["hooks"]},
    }


def check(ranks: Pool, case: Case, owners: Owners) -> None:
    """Compare processes with threads, to the bit."""
    with torch.random.fork_rng(devices=[]):
        expected, next_number = run_case(case)
    found = ranks.run(run_case, case, owners, among=len(set(owners)))

    for k, one in enumerate(expected):
        for records, number in found:
            other = records[k]
            other["buffers"] = values(other["buffers"])
            assert_equal(other, here(one, other))
            assert_equal(number, next_number)
        for kind in ("gradients", "buffers"):  # each is somewhere
            everywhere = chain.from_iterable(records[k][kind] for records, _ in found)
            assert set(everywhere) == set(one[kind])


def can_be_spread(case: Case) -> bool:
    return len(case.balance) > 1 and "captured" not in case.model.words


@st.composite
def cases_over_processes(draw: st.DrawFn, models: Any) -> tuple[Case, Owners]:
    case = draw(cases(models).filter(can_be_spread))
    workers = [w for w in OWNERS if len(case.balance) % w == 0]
    chosen = draw(st.sampled_from(workers or [len(case.balance)]))
    return replace(case, devices=chosen), draw(st.sampled_from(OWNERS[chosen]))


# Two views of the same elements arrived as one tensor, whose gradients were added in another order.
_STEP = Step(rows=(1,), grad="grad", training=True, between=None, then="accumulate", times=0)
VIEWS = Case(
    Model(
        "flat",
        Passing("list", ("same tensor",), ("linear", "linear"), edits=False),
        ("linear", "tanh", Passing("list", ("view", "view"), (), edits=False)),
        end=None,
    ),
    balance=(1, 5, 1),
    steps=(_STEP, _STEP),
    devices=3,
    chunks=1,
    mode="always",
    threads=True,
    deferred=True,
    frozen=frozenset(),
    frozen_stages=frozenset(),
    leaf=False,
    seed=0,
)


@settings(max_examples=settings().max_examples // 4)
@given(drawn=cases_over_processes(models()))
@example(drawn=(VIEWS, (0, 1, 2)))
def test_drawn_models(four_ranks: Pool, drawn: tuple[Case, Owners]) -> None:
    check(four_ranks, *drawn)


# Models, each by itself.


class Head(nn.Module):
    """Scores for every word, by the embedding's weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert isinstance(weight, nn.Parameter)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def tied_layers() -> nn.Sequential:
    """An embedding, on the first stage, whose weight is the head's, and another stage's."""
    embedding = nn.Embedding(TOKENS, 4)
    again = nn.Sequential(Head(embedding.weight), nn.Linear(TOKENS, 4))
    return nn.Sequential(embedding, nn.Linear(4, 4), again, Head(embedding.weight)).double()


class TiedAround(nn.Module):
    """The weight of the embedding around the layers is that of layers in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.layers = nn.Sequential(
            nn.Linear(4, 4),
            nn.Sequential(Head(self.embedding.weight), nn.Linear(TOKENS, 4)),
            nn.Dropout(0.3),
            nn.Sequential(Head(self.embedding.weight), nn.Linear(TOKENS, 4)),
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return Tensor(nn.functional.linear(self.layers(self.embedding(x)), self.embedding.weight))


def few_tokens(rows: int, seed: int) -> Tensor:
    return tokens(rows, seed=seed) % 11


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str | None]] = {
    "tied": (tied_layers, tokens, None),
    "tied around": (TiedAround, tokens, "layers"),
    "traced": (Encoder, few_tokens, None),
}


def train(
    name: str, balance: Sequence[Any], mode: ActivationCheckpointing, owners: Owners | None
) -> tuple[list[Any], dict[str, Tensor], Tensor]:
    """What came of three steps: losses, outputs; then the parameters, and a random number."""
    make, batch, path = MODELS[name]
    torch.manual_seed(4)
    model = make()
    devices = ["cpu"] * (2 if owners is None else len(owners))
    pipeline = GPipe(
        model,
        balance,
        module=path,
        devices=devices,
        chunks=3,
        activation_checkpointing=mode,
        **processes(owners),
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), 0.01)
    found = []
    for k, rows in enumerate((7, 7, 2)):
        x = batch(rows, seed=k)
        loss = pipeline(x).square().mean() + pipeline(x.flip(0)).mean()  # two nodes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((loss.detach(), x.grad))
    pipeline.close()
    return found, values(pipeline.state_dict()), torch.rand(())


@pytest.mark.parametrize("mode", ["never", "except_last"])
@pytest.mark.parametrize("owners", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(four_ranks: Pool, name: str, owners: Owners, mode: ActivationCheckpointing) -> None:
    balance = {"tied": [2, 2], "tied around": [2, 2], "traced": [3, 3]}[name]
    with torch.random.fork_rng(devices=[]):
        steps, parameters, number = train(name, balance, mode, None)
    found = four_ranks.run(train, name, balance, mode, owners, among=2)

    for other_steps, other_parameters, other_number in found:
        assert_equal((other_steps, other_number), (steps, number))
        assert_equal(other_parameters, {name: parameters[name] for name in other_parameters})
    assert set(parameters) == set(chain.from_iterable(each for _, each, _ in found))
