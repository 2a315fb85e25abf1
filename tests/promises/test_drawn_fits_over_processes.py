"""Same numbers: drawn LightningModules train over processes as in a plain Trainer.

For each schedule, over two and four processes, with a process for each stage or for each machine,
with replicas, with outputs for all processes or for the last stage only. The suite draws a few
fits, always the same; `make soak` hundreds of new ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import OutOfStep, RankFailed
from tests.promises.test_drawn_fits import SOAK, check
from tests.support.drawn_fits import SINGLE_STEPS, Fit, Outcome, fits, outcome
from tests.support.drawn_modules import Model
from tests.support.drawn_parts import LAYERS, MIXING_LAYERS, Part, Step
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over
from tests.support.vocabulary import DRAWING

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:a pipeline does not run the activation checkpointing"),
]


# The numbers of stages and devices with which each schedule runs.
SIZES = {
    2: {
        "fill_drain": [(2, 2)],
        "1f1b": [(2, 2), (4, 2)],
        "zero_bubble": [(2, 2)],
        "zero_bubble_v": [(4, 2)],
        "v_half": [(4, 2)],
        "v_min": [(4, 2)],
    },
    4: {
        "fill_drain": [(4, 4)],
        "1f1b": [(4, 4), (8, 4)],
        "zero_bubble": [(4, 4)],
        "zero_bubble_v": [(8, 4)],
        "v_half": [(8, 4)],
        "v_min": [(8, 4)],
    },
}


class Place(NamedTuple):
    """Where a pipeline runs: its processes, how many devices it has, and on how many machines."""

    processes: str
    devices: int
    machines: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.machines if self.processes == "per_node" else self.devices


PLACES = [Place("per_stage", 2), Place("per_stage", 4), Place("per_node", 4, machines=2)]
# Two replicas of the second have eight processes.
REPLICATED = PLACES if SOAK else [Place("per_stage", 2), Place("per_node", 4, machines=2)]
BATCH_NORMS = [name for name in MIXING_LAYERS if name.startswith("batch norm")]


def has_processes(fit: Fit, outputs: str) -> bool:
    """Whether nothing refuses a fit over processes, which a plain Trainer runs."""
    one = len(fit.model.parts) == 1 and fit.model.loss != "manual"
    averaged = any(name in SINGLE_STEPS for name in fit.callbacks)
    return not averaged and (one or outputs == "all")


@st.composite
def placed(
    draw: st.DrawFn, places: Sequence[Place] = PLACES, layers: Sequence[str] = tuple(LAYERS)
) -> tuple[Fit, Place, str]:
    """A fit, where it runs, and which processes get the outputs."""
    outputs, place = draw(st.sampled_from(["all", "last"])), draw(st.sampled_from(places))
    drawn = fits(layers=layers, sizes=SIZES[place.devices])
    return draw(drawn.filter(lambda fit: has_processes(fit, outputs))), place, outputs


@st.composite
def placed_as_one(draw: st.DrawFn) -> tuple[Fit, Place, str]:
    """The same, for fits that are compared with those of one process: micro-batches matter."""
    layers = [*LAYERS, *DRAWING, *DRAWING, *BATCH_NORMS]
    fit, place, outputs = draw(placed(layers=layers))
    options = dict(fit.trainer) | {"precision": draw(st.sampled_from(["64-true", "bf16-mixed"]))}
    return replace(fit.but(verify=False), trainer=tuple(options.items())), place, outputs


def run(
    fit: Fit,
    root: Path,
    options: dict[str, Any] | None,
    machines: int = 1,
    *,
    plain: bool = False,
) -> Any:
    """The outcome of a fit, or its error."""
    root.mkdir(exist_ok=True)
    try:
        return outcome(fit, root, plain=plain, processes=options, machines=machines)
    except (RankFailed, OutOfStep):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Once the first block of its second stage had no values when it was tried.
TIED = Fit(
    Model(
        (
            Part(
                "loop",
                tuple(
                    Step("nothing", layers, call)
                    for layers in ("linear", "tanh")
                    for call in ("plain", "edited")
                ),
                starts=(1,),
                named=False,
                tied=True,
            ),
        ),
        "nothing",
        skip=False,
        loss="mean",
        logs=("loss",),
        optimizer="momentum",
        scheduler="none",
    ),
    2,
    tuple({"schedule": "fill_drain", "chunks": 2, "verify": False}.items()),
    (),
    rows=8,
    size=4,
    shuffle=False,
    resumed=None,
    trainer=(("max_epochs", 1), ("precision", "64-true")),
    seed=1,
)


@example(drawn=(TIED, Place("per_stage", 2), "all"))
@settings(max_examples=300 if SOAK else settings().max_examples // 12)
@given(drawn=placed())
def test_drawn_fits(
    two_ranks: Pool,
    four_ranks: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Fit, Place, str],
) -> None:
    root = tmp_path_factory.mktemp("fit")
    expected = run(drawn[0], root / "plain", None, plain=True)

    check_over_processes(drawn, expected, {2: two_ranks, 4: four_ranks}, root)


@pytest.mark.filterwarnings("ignore:verified. between a plain run")  # other random numbers
@settings(max_examples=200 if SOAK else settings().max_examples // 15)
@given(drawn=placed_as_one())
def test_drawn_fits_by_micro_batches(
    two_ranks: Pool,
    four_ranks: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Fit, Place, str],
) -> None:
    """With dropout, batch norms in stages, and sums in low precision, as in one process."""
    root = tmp_path_factory.mktemp("fit")
    expected = run(drawn[0], root / "single", None)

    check_over_processes(drawn, expected, {2: two_ranks, 4: four_ranks}, root)


def check_over_processes(
    drawn: tuple[Fit, Place, str], expected: Any, pools: Mapping[int, Pool], root: Path
) -> None:
    """Compare a fit over processes with what is expected of each."""
    fit, place, outputs = drawn
    options = {"processes": place.processes, "outputs": outputs}

    found = pools[place.ranks].run(run, fit, root / "all", options, place.machines)

    compare(fit, found, [expected] * place.ranks, outputs, firsts=[0])


SHARDING = [None, "optimizer", "gradients", "parameters"]


@settings(max_examples=200 if SOAK else settings().max_examples // 15)
@given(drawn=placed(REPLICATED), sharding=st.sampled_from(SHARDING))
def test_drawn_fits_of_replicas(
    two_ranks: Pool,
    four_ranks: Pool,
    eight_ranks: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Fit, Place, str],
    sharding: str | None,
) -> None:
    """Two replicas over processes, which may divide what they have, train as two of one each."""
    (fit, place, outputs), root = drawn, tmp_path_factory.mktemp("fit")
    assume(sharding != "parameters" or len(fit.model.parts) == 1)
    if sharding == "parameters" and dict(fit.strategy)["verify"] is True:
        fit = fit.but(verify=False)
    options: dict[str, Any] = {"replicas": 2, "ddp": {"find_unused_parameters": True}}
    expected = two_ranks.run(run, fit, root / "single", options)

    options |= {"processes": place.processes, "outputs": outputs, "sharding": sharding}
    if sharding in ("gradients", "parameters"):
        del options["ddp"]
    number = 2 * place.ranks
    pool = four_ranks if number == 4 else eight_ranks
    found = pool.run(run, fit, root / "all", options, 2 * place.machines)

    each = [expected[k // place.ranks] for k in range(number)]
    compare(fit, found, each, outputs, firsts=[0, place.ranks])


class Flat(L.LightningModule):
    """Nothing around the pipeline, whose last stage has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_flat(root: Path) -> None:
    strategy = {"schedule": "1f1b", "chunks": 2, "verify": True}
    made = trainer_over(root, "per_stage", [1, 1], strategy, max_epochs=1)
    made.fit(Flat(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))


def test_stage_without_parameters_is_verified(tmp_path: Path, two_ranks: Pool) -> None:
    """Once its process left out the backward of a verification, and the others waited for it."""
    two_ranks.run(fit_flat, tmp_path)


def compare(
    fit: Fit, found: Sequence[Any], expected: Sequence[Any], outputs: str, firsts: Sequence[int]
) -> None:
    """Compare what came of a fit in each process; the ``firsts`` have its outputs in any case."""
    for rank, (each, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(other, str):
            assert each == other
            continue
        assert isinstance(each, Outcome), each
        has_outputs = outputs == "all" or rank in firsts
        check(fit, values_in(each), alike(other, each, has_outputs=has_outputs))


def values_in(found: Outcome) -> Outcome:
    """The outcome without tensors that other processes have."""
    trained = [[_but_meta(one, one), *others] for one, *others in found.trained]
    return Outcome(trained, found.logged)


def _but_meta(entry: Any, found: Any) -> Any:
    if not isinstance(entry, dict) or not isinstance(found, dict):
        return entry
    return {name: x for name, x in entry.items() if not getattr(found[name], "is_meta", False)}


def alike(expected: Outcome, found: Outcome, *, has_outputs: bool) -> Outcome:
    """The outcome without what this process lacks."""
    pairs = zip(expected.trained, found.trained, strict=True)
    trained = [[_but_meta(one, two), *others] for (one, *others), (two, *_) in pairs]
    logged = []
    for one, two in zip(expected.logged, found.logged, strict=True):
        if isinstance(two[0], list):
            seen = [seen_here(*each, has_outputs) for each in zip(one[0], two[0], strict=True)]
            one = [seen, *one[1:]]
        logged.append(one)
    return Outcome(trained, logged)


def seen_here(expected: Any, found: Any, has_outputs: bool) -> Any:
    if isinstance(expected, dict):  # gradients
        return {name: expected[name] for name in found}
    if has_outputs:
        return expected
    step, metrics, outputs = expected
    return [step, metrics, {"loss": outputs["loss"]} if isinstance(outputs, dict) else outputs]
