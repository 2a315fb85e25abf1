"""Drawn models on two to four GPUs: the numbers of the plain module, and no race between streams.

On real GPUs too; but only simulated ones report every race, whatever the timing was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_gpipe.core.layout import Weights
from lightning_gpipe.core.run.host import waiting_activations
from lightning_gpipe.core.schedules import ActivationCheckpointing, OffloadActivations
from tests.gpu.models import ON_GPU
from tests.simcuda.hazards import NAME, FailOnHazard
from tests.support.drawn import check, pipe
from tests.support.grammar import DRAWN_MODES, Case, cases, drawing_models, models
from tests.support.models import assert_same

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.usefixtures("one_intra_op_thread"),
    # PyTorch, of a layer with such a hook whose input requires no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:an output of layers should have a row per sample"),
    # Sums over normalised rows are the same without being functions of weights.
    pytest.mark.filterwarnings("ignore:the loss term .sum. is the same for all micro-batches"),
]
# The fused kernel of GRUs is CUDA's only, and simulated GPUs have no sparse tensors.
NOT_SIMULATED = {"recurrent", "sparse embedding"}


@pytest.fixture(scope="session")
def hazards(request: pytest.FixtureRequest) -> Callable[[], list[str]]:
    """Takes the hazards so far, so that the case which has them is the one that fails."""
    plugin = request.config.pluginmanager.get_plugin(NAME)
    return plugin.take if isinstance(plugin, FailOnHazard) else list


def gpus(workers: int) -> list[str]:
    return [f"cuda:{k}" for k in range(workers)]


def simulated(case: Case) -> bool:
    return not {*case.model.words, str(case.model.start)} & NOT_SIMULATED


# Operators take their time there: 15 cases in the suite, 500 new ones in `make soak`.
fewer = settings(max_examples=settings().max_examples // 4)


@fewer
@given(
    case=cases(models()).filter(simulated),
    weights=st.sampled_from(get_args(Weights)),
    offload=st.one_of(st.booleans(), st.lists(st.integers(0, 4), min_size=8, max_size=8)),
)
def test_drawn_models(
    hazards: Callable[[], list[str]], case: Case, weights: Weights, offload: OffloadActivations
) -> None:
    if isinstance(offload, list):
        offload = offload[: len(case.balance)]
    assume(weights == "device" or "momentum" not in case.model.words)  # which edits a weight
    with patch.object(waiting_activations, "_SMALL", 0):
        check(case, gpus, weights=weights, offload_activations=offload)

    assert hazards() == []


@fewer
@given(
    case=cases(drawing_models()).filter(simulated),
    mode=st.sampled_from(DRAWN_MODES),
    threads=st.booleans(),
)
def test_drawn_models_that_draw(
    hazards: Callable[[], list[str]], case: Case, mode: ActivationCheckpointing, threads: bool
) -> None:
    records = []
    for each in (case, replace(case, mode=mode, threads=threads)):
        with torch.random.fork_rng(devices=[]):
            records.append(pipe(each, each.build(), gpus))

    for one, other in zip(*records, strict=True):
        assert_same(one._asdict(), other._asdict())
    assert hazards() == []
