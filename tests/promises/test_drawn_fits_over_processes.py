"""Same numbers: drawn LightningModules train over two processes as in a plain Trainer.

For each schedule, with outputs for all processes or for the last stage only. The suite draws a few
fits, always the same; `make soak` hundreds of new ones.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpipe import OutOfStep, RankFailed
from tests.promises.test_drawn_fits import SOAK, check
from tests.support.drawn_fits import SINGLE_STEPS, Fit, Outcome, fits, outcome
from tests.support.ranks import Pool

pytestmark = [
    pytest.mark.usefixtures("one_intra_op_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]


def fits_processes(fit: Fit, outputs: str) -> bool:
    """Whether nothing refuses a fit of two processes, which a plain Trainer runs."""
    one = len(fit.model.parts) == 1 and fit.model.loss != "manual"
    averaged = any(name in SINGLE_STEPS for name in fit.callbacks)
    return fit.devices == 2 and not averaged and (one or outputs == "all")


@st.composite
def placed(draw: st.DrawFn) -> tuple[Fit, str]:
    outputs = draw(st.sampled_from(["all", "last"]))
    fit = draw(fits().filter(lambda fit: fits_processes(fit, outputs)))
    return fit, outputs


def run(fit: Fit, root: Path, options: dict[str, Any] | None) -> Any:
    """The outcome of a fit, or its error."""
    root.mkdir(exist_ok=True)
    try:
        return outcome(fit, root, plain=options is None, processes=options)
    except (RankFailed, OutOfStep):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=300 if SOAK else 8)
@given(drawn=placed())
def test_drawn_fits(
    two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Fit, str]
) -> None:
    (fit, outputs), root = drawn, tmp_path_factory.mktemp("fit")
    expected = run(fit, root / "plain", None)

    found = two_ranks.run(run, fit, root / "both", {"processes": "per_stage", "outputs": outputs})

    if isinstance(expected, str):
        assert found == [expected] * 2
        return
    for rank, each in enumerate(found):
        assert isinstance(each, Outcome), each
        has_outputs = outputs == "all" or not rank
        check(fit, values_in(each), alike(expected, each, has_outputs=has_outputs))


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
