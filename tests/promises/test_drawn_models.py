"""Transparency: drawn models compute the same numbers however they are run.

The suite draws a few cases, always the same; `make soak` thousands of new ones. How a case is
run and compared is in `tests/support/drawn.py`; on GPUs, in `tests/gpu/test_drawn_models.py`.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpipe.core.schedules import ActivationCheckpointing
from tests.support.drawn import check, pipe
from tests.support.grammar import DRAWN_MODES, Case, Model, Step, cases, drawing_models, models
from tests.support.models import assert_same

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    # PyTorch, of a layer with such a hook whose input requires no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Sums over normalised rows are the same without being functions of weights.
    pytest.mark.filterwarnings("ignore:the loss term .sum. is the same for all micro-batches"),
]


@given(case=cases(models()))
def test_drawn_models(case: Case) -> None:
    check(case)


@settings(max_examples=settings().max_examples // 2)  # each runs two pipelines
@given(case=cases(drawing_models()), mode=st.sampled_from(DRAWN_MODES), threads=st.booleans())
def test_drawn_models_that_draw(case: Case, mode: ActivationCheckpointing, threads: bool) -> None:
    records = []
    for each in (case, replace(case, mode=mode, threads=threads)):
        with torch.random.fork_rng(devices=[]):
            records.append(pipe(each, each.build()))

    for one, other in zip(*records, strict=True):
        assert_same(one._asdict(), other._asdict())


# What the cases found, each by itself.


def flat(*runs: str) -> Model:
    return Model("flat", "bare", runs, None)


FOUND = {
    # Once the first forward, which copies nothing, decided that the stage edits nothing.
    "edit in place after a forward without gradients": Case(
        flat("edit"), (1, 1), (Step(grad="no grad"), Step())
    ),
    # Once recomputation found the buffer moved on, and moved it on again: other gradients.
    # Once the copy for the first micro-batch had no version counter, so that the edit of the second
    # seemed to be new.
    "edit of the input, at first in inference mode": Case(
        Model("flat", "edited", ("linear",), None),
        (1, 1),
        (Step(grad="inference"), Step()),
        leaf=False,
    ),
    "buffer that changes in training only": Case(
        flat("linear", "spectral norm"), (1, 1), (Step(training=False), Step())
    ),
    "buffer that does not change at first": Case(
        flat("linear", "spectral norm, repeated"), (1, 1), (Step(times=0), Step())
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_cases_that_were_found(case: Case) -> None:
    check(case)
