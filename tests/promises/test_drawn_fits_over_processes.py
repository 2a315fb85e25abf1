"""Same numbers: drawn LightningModules train over processes as in a plain Trainer.

For each schedule, over two and four processes, with a process for each stage or for each machine,
with replicas, with outputs for all processes or for the last stage only. The suite draws a few
fits, always the same; `make soak` hundreds of new ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpipe import OutOfStep, RankFailed
from tests.promises.test_drawn_fits import SOAK, check
from tests.support.drawn_fits import SINGLE_STEPS, Fit, Outcome, fits, outcome
from tests.support.ranks import Pool
from tests.support.trainers import trainer_over

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
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
    4: {"fill_drain": [(4, 4)], "1f1b": [(4, 4)], "zero_bubble": [(4, 4)]},
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


def has_processes(fit: Fit, outputs: str) -> bool:
    """Whether nothing refuses a fit over processes, which a plain Trainer runs."""
    one = len(fit.model.parts) == 1 and fit.model.loss != "manual"
    averaged = any(name in SINGLE_STEPS for name in fit.callbacks)
    return not averaged and (one or outputs == "all")


@st.composite
def placed(draw: st.DrawFn, places: Sequence[Place] = PLACES) -> tuple[Fit, Place, str]:
    """A fit, where it runs, and which processes get the outputs."""
    outputs, place = draw(st.sampled_from(["all", "last"])), draw(st.sampled_from(places))
    drawn = fits(sizes=SIZES[place.devices]).filter(lambda fit: has_processes(fit, outputs))
    return draw(drawn), place, outputs


def run(fit: Fit, root: Path, options: dict[str, Any] | None, machines: int = 1) -> Any:
    """The outcome of a fit, or its error."""
    root.mkdir(exist_ok=True)
    try:
        return outcome(fit, root, plain=options is None, processes=options, machines=machines)
    except (RankFailed, OutOfStep):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=300 if SOAK else 5)
@given(drawn=placed())
def test_drawn_fits(
    two_ranks: Pool,
    four_ranks: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Fit, Place, str],
) -> None:
    (fit, place, outputs), root = drawn, tmp_path_factory.mktemp("fit")
    options = {"processes": place.processes, "outputs": outputs}
    expected = run(fit, root / "plain", None)

    ranks = two_ranks if place.ranks == 2 else four_ranks
    found = ranks.run(run, fit, root / "all", options, place.machines)

    compare(fit, found, [expected] * place.ranks, outputs, firsts=[0])


@settings(max_examples=150 if SOAK else 2)
@given(drawn=placed([Place("per_stage", 2)]))
def test_drawn_fits_of_replicas(
    two_ranks: Pool,
    four_ranks: Pool,
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[Fit, Place, str],
) -> None:
    """Two replicas over two processes each train as two in one process each."""
    (fit, place, outputs), root = drawn, tmp_path_factory.mktemp("fit")
    options: dict[str, Any] = {"replicas": 2, "ddp": {"find_unused_parameters": True}}
    expected = two_ranks.run(run, fit, root / "single", options)

    options |= {"processes": place.processes, "outputs": outputs}
    found = four_ranks.run(run, fit, root / "all", options)

    compare(fit, found, [expected[k // 2] for k in range(4)], outputs, firsts=[0, 2])


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
