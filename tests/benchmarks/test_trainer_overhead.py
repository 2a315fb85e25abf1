"""The benchmark runs, small; what it measures is not for a test to judge."""

import pytest
import torch

from benchmarks import trainer_overhead
from benchmarks.harness.fits import fitting, quiet
from benchmarks.trainer_overhead import LanguageModel, language_model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(trainer_overhead.CHARACTERS, (2, 5))
    return codes[:, :-1], codes[:, 1:]


def test_small_run_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--rounds 2 --starts 1 --blocks 1 --width 8 --time 4 --batch-size 2"
    trainer_overhead.main(small.split())

    report = capsys.readouterr().out
    rows = "demo, ours", "tiny, plain Lightning", "tiny, torch.utils.checkpoint"
    for row in (*rows, "tiny, GPipe in plain Lightning"):
        assert row in report


def test_fit_does_one_batch_at_a_time() -> None:
    model = LanguageModel(language_model(0, 4), batch(), recomputed=False)
    with quiet(), fitting(model, "auto", 1) as fit:
        begun = model.global_step
        seconds = [fit.step() for _ in range(3)]
        assert (begun, model.global_step) == (0, 3)

    assert all(each > 0 for each in seconds)
    assert model.global_step == 3


def test_error_in_a_fit_reaches_the_caller() -> None:
    x, y = batch()
    model = LanguageModel(language_model(0, 4), (x, y + 1000), recomputed=False)

    with quiet(), pytest.raises(IndexError), fitting(model, "auto", 1) as fit:
        fit.step()
