"""Unchanged model: drawn LightningModules train in drawn Trainers as without the strategy.

The suite draws a few fits, always the same; `make soak` a thousand new ones. What is drawn is in
`tests/support/drawn_fits.py`, and the files that it imports. A fit that is refused fails,
unless its operators mix rows, or the plain Trainer refuses it too: in its last epoch Lightning's
averages of weights skip backward, and then PyTorch cannot clip, say.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from lightning_gpipe.core.data.pytree import FlatTree, tree_flatten, tree_unflatten
from tests.support.drawn_fits import Fit, Outcome, fits, outcome
from tests.support.drawn_modules import Model
from tests.support.drawn_parts import LAYERS, MIXING, OPERATORS, Part, Step
from tests.support.models import assert_same
from tests.support.pipes import MODES
from tests.support.vocabulary import DRAWING

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    # PyTorch, of a layer with such a hook whose input requires no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Lightning, of layers that keep eval mode, and of a checkpoint within an epoch.
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    # Ours, of layers with their own checkpointing in a traced forward.
    pytest.mark.filterwarnings("ignore:a pipeline does not run the activation checkpointing"),
]

SOAK = settings().max_examples > 1000
Paths = pytest.TempPathFactory
FROZEN = Step("nothing", "frozen batch norm", "by keyword")


# Once the step that Lightning makes after an epoch without backward, for the statistics of batch
# norms, found no gradients of the epoch before.
AVERAGED = Fit(
    Model(
        (
            Part(
                "sequential",
                (Step("nothing", "linear", "by keyword"), FROZEN),
                starts=(1,),
                named=False,
            ),
        ),
        "embedding",
        skip=False,
        loss="mean",
        logs=(),
        optimizer="adam",
        scheduler="epochs",
    ),
    devices=2,
    strategy=(("schedule", "1f1b"), ("chunks", 1)),
    callbacks=("averages",),
    rows=9,
    size=2,
    shuffle=False,
    resumed=None,
    trainer=(("max_epochs", 1), ("val_check_interval", 0.5), ("precision", "64-true")),
    seed=0,
)


@example(fit=AVERAGED)
@settings(max_examples=1000 if SOAK else settings().max_examples // 7)
@given(fit=fits())
def test_drawn_fits(fit: Fit, tmp_path_factory: Paths) -> None:
    compare(fit, tmp_path_factory, partial(run, fit, tmp_path_factory, plain=True))


@pytest.mark.filterwarnings("ignore:verified. between a plain run")  # other random numbers
@settings(max_examples=250 if SOAK else settings().max_examples // 15)
@given(
    fit=fits(layers=[*LAYERS, *DRAWING, *DRAWING]),
    mode=st.sampled_from(MODES),
    threads=st.booleans(),
)
def test_drawn_fits_that_draw(fit: Fit, mode: Any, threads: bool, tmp_path_factory: Paths) -> None:
    other = fit.but(activation_checkpointing=mode, threads=threads)
    compare(fit, tmp_path_factory, partial(run, other, tmp_path_factory))


# Once its loss grew to 1e40, and EarlyStopping told all digits of it.
DIVERGED = Fit(
    Model(
        tuple(
            Part(
                "loop",
                (
                    Step("attention", "frozen batch norm", "residual"),
                    Step("turned", turned, turned_call),
                    Step(last, "frozen batch norm", "residual"),
                ),
                starts=(1, 2),
                named=True,
            )
            for turned, turned_call, last in (
                ("linear", "edited", "buffer"),
                ("frozen batch norm", "residual", "nothing"),
            )
        ),
        "batch norm",
        skip=True,
        loss="mean",
        logs=("count",),
        optimizer="momentum",
        scheduler="epochs",
    ),
    3,
    tuple(
        {
            "schedule": "fill_drain",
            "chunks": 3,
            "activation_checkpointing": None,
            "threads": True,
            "split_backward": False,
            "verify": "sample",
            "around": "last",
        }.items()
    ),
    ("stopping", "best"),
    rows=11,
    size=2,
    shuffle=False,
    resumed=2,
    trainer=(("max_epochs", 2), ("val_check_interval", 0.5), ("precision", "64-true")),
    seed=491,
)


@example(fit=DIVERGED)
@settings(max_examples=250 if SOAK else settings().max_examples // 10)
@given(fit=fits([*OPERATORS, *MIXING, *MIXING], frontends=["loop", "traced"]))
def test_drawn_fits_that_mix_rows(fit: Fit, tmp_path_factory: Paths) -> None:
    """Are refused, unless they mix rows outside of the pipeline, or by their number only."""
    if fit.by_rows:  # the rows around the pipeline are those of a micro-batch
        fit = fit.but(verify=True)
    try:
        piped = run(fit, tmp_path_factory)
    except (TypeError, ValueError, RuntimeError) as error:
        event(f"refused: {type(error).__name__}")
    else:
        check(fit, piped, run(fit, tmp_path_factory, plain=True))


def run(fit: Fit, paths: Paths, *, plain: bool = False) -> Outcome:
    return outcome(fit, paths.mktemp("fit"), plain=plain)


def compare(fit: Fit, paths: Paths, expect: Callable[[], Outcome]) -> None:
    """Compare a fit with another run, or its error with that of the other."""
    try:
        expected = expect()
    except Exception as error:
        event(f"the other is refused: {type(error).__name__}")
        with pytest.raises(type(error), match=re.escape(str(error)) or None):  # some say nothing
            run(fit, paths)
    else:
        check(fit, run(fit, paths), expected)


def check(fit: Fit, found: Outcome, expected: Outcome) -> None:
    """Compare two runs; Lightning logs in single precision."""
    assert_same(*map(numbers, (found.trained, expected.trained)), within=fit.exactness)
    assert_same(*map(numbers, (found.logged, expected.logged)), within=max(1e-6, fit.exactness))


def numbers(tree: Any) -> Any:
    """The tree with tensors for floating-point numbers."""
    leaves, structure = tree_flatten(tree)
    made = [torch.tensor(leaf) if isinstance(leaf, float) else leaf for leaf in leaves]
    return tree_unflatten(FlatTree(made, structure))
