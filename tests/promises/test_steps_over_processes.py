"""Same numbers: a loss for each micro-batch over several processes, as in one, to the bit.

That one process gives what the plain module gives, is proven in `test_steps_by_micro_batch.py`.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpipe import GPipe, collect_loss_terms, loss_term
from lightning_gpipe.core.schedules import SCHEDULES, ActivationCheckpointing, ByMicroBatch
from tests.promises.test_processes import OWNERS, TiedAround, tied_layers
from tests.promises.test_programs_of_micro_batches import TURNS, WITHOUT, Padded, Traced
from tests.promises.test_steps_by_micro_batch import (
    Around,
    Scales,
    around,
    chunks_of,
    folds,
    schedule_of,
    step_with,
    steps,
)
from tests.support.faults import Fuse, OwnError, throw
from tests.support.grammar import Case
from tests.support.loops import tokens
from tests.support.models import Call, rows
from tests.support.processes import Owners, assert_equal, processes, said, values
from tests.support.ranks import Pool

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Sums over normalised rows are the same without being functions of weights.
    pytest.mark.filterwarnings("ignore:the loss term .sum. is the same for all micro-batches"),
]

Came = tuple[list[Any], dict[str, Tensor | None], dict[str, Tensor], Tensor]


def come_of(seen: list[Any], *modules: nn.Module) -> Came:
    """What was seen, the gradients and buffers that are here, and the next random number."""
    found = nn.ModuleList(modules)
    parameters = {name: p for name, p in found.named_parameters() if not p.is_meta}
    gradients = {name: p.grad for name, p in parameters.items()}
    return seen, gradients, values(dict(found.named_buffers())), torch.rand(())


def check(ranks: Pool, run: Callable[..., Came], *args: Any, owners: Owners) -> None:
    """Compare processes with one, to the bit."""
    with torch.random.fork_rng(devices=[]):
        expected = run(*args, None)
    for found in ranks.run(run, *args, owners, among=len(set(owners))):
        for one, two in zip(found, expected, strict=True):
            if isinstance(two, dict):
                two = {name: two[name] for name in one}
            assert_equal(one, two)


# Drawn models.


def run_drawn(case: Case, outside: Around, owners: Owners | None) -> Came:
    torch.manual_seed(case.seed)
    module, scales = case.build(), Scales(outside)
    pipeline = GPipe(
        module,
        case.balance,
        devices=["cpu"] * case.devices,
        chunks=chunks_of(case),
        activation_checkpointing=case.mode,
        deferred_batch_norm=case.deferred,
        threads=case.threads,
        split_backward=case.split,
        folded=folds(case),
        **processes(owners),
    )
    step = step_with(pipeline, scales, module, case, outside)
    generator = torch.Generator().manual_seed(case.seed)
    losses = []
    for each in case.steps:
        module.train(each.training)
        x = case.model.tensor(each.rows[0], generator)
        outcome = pipeline.by_micro_batch(step, x, schedule=schedule_of(case), around=scales)
        assert outcome.loss is not None
        losses.append(outcome.loss.detach())
        if outcome.loss.requires_grad:  # else all is frozen
            outcome.loss.backward()
    pipeline.close()
    return come_of(losses, module, scales)


def can_be_spread(drawn: tuple[Case, Around]) -> bool:
    case, outside = drawn
    alone = {"captured", "shared"} & set(" ".join(case.model.words).split())
    return len(case.balance) > 1 and not alone and not outside.penalty


@st.composite
def drawn_over_processes(draw: st.DrawFn) -> tuple[Case, Around, Owners]:
    case, outside = draw(st.tuples(steps, around).filter(can_be_spread))
    workers = [w for w in OWNERS if len(case.balance) in (w, 2 * w)]
    chosen = draw(st.sampled_from(workers or [len(case.balance)]))
    return replace(case, devices=chosen), outside, draw(st.sampled_from(OWNERS[chosen]))


@settings(max_examples=settings().max_examples // 6)
@given(drawn=drawn_over_processes())
def test_drawn_steps(four_ranks: Pool, drawn: tuple[Case, Around, Owners]) -> None:
    case, outside, owners = drawn
    check(four_ranks, run_drawn, case, outside, owners=owners)


# Kinds of models, under all schedules.


class Normed(nn.Module):
    """Batch norms and dropout in the layers, and around them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2))
        self.layers = nn.Sequential(
            *[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))],
        )
        for k in (2, 6):
            self.layers[k] = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4), nn.Tanh())
        self.after = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layers(self.before(x)))


class Balanced(Normed):
    """Layers of all stages hand out loss terms."""

    def __init__(self) -> None:
        super().__init__()
        for k in (1, 3, 5, 7):
            self.layers[k] = Call(balance)

    def forward(self, x: Tensor) -> Tensor:
        with collect_loss_terms() as terms:
            output = super().forward(x)
        return output * (1 + terms["mean"] + terms["sum"])


def balance(x: Tensor) -> Tensor:
    loss_term("sum", 0.01 * x.square().sum())
    loss_term("mean", x.abs().mean(), reduction="mean")
    return x


def turns(count: int, seed: int) -> Tensor:
    """Rows of which some micro-batches have padding."""
    return (TURNS if seed else WITHOUT)[:count]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str | None, int]] = {
    "normed": (Normed, rows, "layers", 8),
    "balanced": (Balanced, rows, "layers", 8),
    "tied": (tied_layers, tokens, None, 4),
    "tied around": (TiedAround, tokens, "layers", 4),
    "loop": (Padded, turns, "layers", 4),
    "traced": (Traced, turns, "stack", 12),
}


def run_model(
    name: str,
    schedule: ByMicroBatch,
    mode: ActivationCheckpointing,
    stages: int,
    devices: int,
    owners: Owners | None,
) -> Came:
    """What comes of three steps with accumulated gradients, and of an evaluation between."""
    make, batch, path, layers = MODELS[name]
    torch.manual_seed(4)
    model = make()
    pipeline = GPipe(
        model,
        [layers // stages] * stages,
        module=path,
        devices=["cpu"] * devices,
        chunks=4,
        activation_checkpointing=mode,
        folded=SCHEDULES[schedule].folded,
        **processes(owners),
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), 0.01)

    def step(x: Tensor) -> dict[str, Any]:
        output = pipeline(x)
        found = (output if isinstance(output, Tensor) else output[0]) * (1 + torch.rand(()))
        return {"loss": found.square().mean(), "output": found}

    seen: list[Any] = []
    for k, count in enumerate((8, 8, 5)):
        outcome = pipeline.by_micro_batch(step, batch(count, seed=k), schedule=schedule)
        assert outcome.loss is not None
        outcome.loss.backward()
        seen += [outcome.loss.detach(), *(each["output"] for each in outcome.results)]
        if k == 1:
            optimizer.step()
            with torch.no_grad():
                seen.append(pipeline(batch(8, seed=3)))
    pipeline.close()
    return come_of(seen, model)


CUTS = [
    ("1f1b", 2, (0, 1), "never"),
    ("zero_bubble", 4, (0, 1, 0, 1), "never"),
    ("1f1b", 4, (1, 0), "always"),  # interleaved
    ("1f1b", 4, (0, 1, 2, 3), "except_last"),
    ("zero_bubble_v", 4, (0, 1), "never"),
    ("1f1b", 4, (0, 0, 1, 1), "never"),
    ("v_half", 4, (0, 1), "always"),
    ("v_min", 4, (0, 1), "never"),
]


@pytest.mark.parametrize(
    "name, schedule, stages, owners, mode",
    # Each model with half of them, and each of them with half of the models.
    [(name, *each) for k, name in enumerate(MODELS) for each in CUTS[k % 2 :: 2]],
)
def test_models(
    four_ranks: Pool,
    name: str,
    schedule: ByMicroBatch,
    stages: int,
    owners: Owners,
    mode: ActivationCheckpointing,
) -> None:
    args = name, schedule, mode, stages, len(owners)
    check(four_ranks, run_model, *args, owners=owners)


# Faults.


PLACES = ["before", "after", "layer", "layer's backward"]


def burn(place: str, at: int, rank: int, owners: Owners) -> tuple[str, float]:
    """The error of a step in which a fuse burns in one process, and the loss of the next step."""
    torch.manual_seed(1)
    fuses = {each: Fuse() for each in PLACES}
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
    blocks[3].extend([fuses["layer"], fuses["layer's backward"]])
    layers = nn.Sequential(*blocks).double()
    pipeline = GPipe(layers, [1] * 4, devices=["cpu"] * len(owners), chunks=4, **processes(owners))

    def step(x: Tensor) -> Tensor:
        fuses["before"].called("forward")
        h = pipeline(x)
        fuses["after"].called("forward")
        return h.square().mean()

    def run() -> float:
        loss = pipeline.by_micro_batch(step, rows(8)).loss
        assert loss is not None
        loss.backward()
        return float(loss)

    run()
    if pipeline.layout.rank == rank:
        direction = "backward" if "backward" in place else "forward"
        fuses[place].light((direction, at), throw(OwnError()))
    error = said(run)
    loss = run()
    pipeline.close()
    return error, loss


@pytest.mark.parametrize("owners", [(0, 1), (0, 1, 2, 3), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [0, 2])
def test_error_in_one_process(four_ranks: Pool, place: str, at: int, owners: Owners) -> None:
    size = len(set(owners))
    rank = size - 1 if "layer" in place else at % size
    found = four_ranks.run(burn, place, at, rank, owners, among=size)

    assert len({loss for _, loss in found}) == 1
    for k, (error, _) in enumerate(found):
        assert error.startswith("OwnError" if k == rank else "RankFailed"), error
        assert k == rank or f"rank {rank}" in error


def step_of_its_own(differs: str, rank: int) -> tuple[str, bool]:
    """The error of a step that differs in one process, and whether the next one is right."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 3)).double()
    pipeline = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=4, **processes((0, 1)))

    def run() -> str:
        return said(lambda: pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(8)))

    first = run()
    if pipeline.layout.rank == rank:
        if differs == "mode":
            layers[1].eval()
        else:
            pipeline.chunks = 2
    error = run()
    layers.train()
    pipeline.chunks = 4
    right = first == run() == "none"
    pipeline.close()
    return error, right


@pytest.mark.parametrize("differs", ["mode", "chunks"])
@pytest.mark.parametrize("rank", [0, 1])
def test_step_that_differs_in_one_process(two_ranks: Pool, differs: str, rank: int) -> None:
    for error, right in two_ranks.run(step_of_its_own, differs, rank):
        assert error.startswith("OutOfStep"), error
        assert right


def burn_at_the_end() -> str:
    """The error of a step whose last backward fails late, on the first stage."""
    fuse = Fuse()
    layers = nn.Sequential(nn.Linear(3, 3), fuse, nn.Linear(3, 3)).double()
    pipeline = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=2, **processes((0, 1)))

    def fail() -> None:
        time.sleep(0.5)
        raise OwnError

    def run() -> None:
        with pipeline.engine.outputs_at_last():
            pipeline.by_micro_batch(lambda x: pipeline(x).square().mean(), rows(4))

    fuse.light(("backward", 1), fail)
    error = said(run)
    pipeline.close()
    return error


def test_process_of_the_last_stage_waits_for_the_first(two_ranks: Pool) -> None:
    first, last = two_ranks.run(burn_at_the_end)

    assert first.startswith("OwnError") and last.startswith("RankFailed"), (first, last)
