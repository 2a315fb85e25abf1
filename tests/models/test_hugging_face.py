"""Models of Hugging Face transformers in a pipeline: a quick selection of ``make models``."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from tests.models.case import Case
from tests.models.hugging_face import CASES
from tests.models.settings import FEW, settings_of
from tests.models.trial import attempt

QUICK = [case for case in CASES if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_model_in_a_pipeline_is_the_same(case: Case) -> None:
    trial = attempt(case, settings_of(case, FEW))

    assert not trial.failures, trial.failures[0].what
