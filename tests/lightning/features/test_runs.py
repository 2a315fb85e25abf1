"""Each feature in use: a pipelined run shows what the plain run on one device shows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import callbacks as library
from lightning_utilities.core.imports import RequirementCache

from tests.lightning.features import arguments, callbacks, found, loggers, plugins
from tests.lightning.features.run import Case, Run, assert_same_run, close, run

CASES = arguments.CASES | callbacks.CASES | loggers.CASES | plugins.CASES


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """A Trainer sets them for the whole process."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def both(case: Case, root: Path) -> Iterator[Run]:
    """The plain run, and the pipelined one."""
    for piped in (False, True):
        yield run(case, root / ("piped" if piped else "plain"), piped=piped)


@pytest.mark.parametrize("name", CASES)
def test_run(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if name in arguments.NEW and name not in found.features()[found.ARGUMENTS]:
        pytest.skip("new in Lightning 2.6")
    if name == "DeviceStatsMonitor":
        pytest.importorskip("psutil")
    if name == "AsyncCheckpointIO" and not RequirementCache("lightning>=2.5.4"):
        pytest.skip("it writes tensors that training goes on to change, of a plain run too")

    with warnings.catch_warnings():
        if case.warns:
            warnings.filterwarnings("ignore", re.escape(case.warns))
        plain, piped = ((each, case.shows(each)) for each in both(case, tmp_path))

    assert plain[1], "what shows that the feature is used is empty"
    close(piped[1], plain[1])
    assert_same_run(piped[0], plain[0])


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")  # without an exception before
@pytest.mark.filterwarnings("ignore:.*was called without a model")  # though it was given one
def test_checkpoint_of_an_exception(tmp_path: Path) -> None:
    def options(root: Path) -> dict[str, object]:
        kept = library.OnExceptionCheckpoint(root, "kept")
        return {"callbacks": [kept, callbacks.Halts()]}

    for piped in (False, True):
        with pytest.raises(ArithmeticError):
            run(Case(options, lambda run: None), tmp_path / str(piped), piped=piped)

    plain, kept = (torch.load(tmp_path / str(each) / "kept.ckpt") for each in (False, True))
    close(kept["state_dict"], plain["state_dict"])
