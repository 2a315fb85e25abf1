"""What two processes did that should have done the same, in words."""

import pytest

from lightning_gpipe.core.transport.interface import Label
from lightning_gpipe.core.transport.process_group.mismatch import difference

TRAINED = Label(minibatch=2, step=4, grad=1, microbatches=4, training=9 << 32 | 77)


def said(theirs: Label, ours: Label) -> str:
    """What is between the rule and the cure."""
    text = difference(theirs, ours, "rank 1", "rank 0", ["GAN.generator"])
    rule, _, rest = text.partition("the same random numbers: ")
    assert rule.startswith("all processes of a pipeline must run the same mini-batches")
    found, _, cure = rest.partition(". ")
    assert cure.startswith("Let each process run the same code")
    return found


@pytest.mark.parametrize(
    "theirs, expected",
    [
        (
            TRAINED._replace(training=77, grad=0),
            "rank 1 runs a forward with no module in training mode without gradients, "
            "and rank 0 a forward with 9 modules in training mode with gradients",
        ),
        (
            TRAINED._replace(minibatch=4, step=5),
            "rank 1 runs a forward of a later mini-batch of step 5, "
            "and rank 0 a forward of an earlier mini-batch of step 4",
        ),
        (
            TRAINED._replace(phase=1, minibatch=0, microbatches=1),
            "rank 1 runs a backward of an earlier mini-batch in 1 micro-batch, "
            "and rank 0 a forward of a later mini-batch in 4 micro-batches",
        ),
        (
            TRAINED._replace(training=9 << 32 | 5, program=3, state=8, phase=-1),
            "rank 1 runs a rehearsal of blocks (or what a log or a metric needs), and rank 0 a "
            "forward, with other modules in training mode, with other calls of layers, or other "
            "numbers in these, with the random generators in other states",
        ),
        (
            Label(minibatch=3, step=5, phase=-2),
            "rank 1 runs a step without a pipeline of step 5, and rank 0 a forward of step 4",
        ),
        (
            TRAINED._replace(pipeline=1),
            "rank 1 runs a forward of pipeline 1 (one that is not here), "
            "and rank 0 a forward of pipeline 0 (GAN.generator)",
        ),
    ],
)
def test_words(theirs: Label, expected: str) -> None:
    assert said(theirs, TRAINED) == expected


def test_steps_whose_outputs_are_for_the_last_stage_may_go_by_what_earlier_ones_have_left() -> None:
    theirs, ours = Label(program=3, at_last=1), Label(program=4, at_last=1)

    text = difference(theirs, ours, "rank 1", "rank 0", [])

    assert "what earlier ones have left in an object" in text
    assert "write outputs='all'" in text
