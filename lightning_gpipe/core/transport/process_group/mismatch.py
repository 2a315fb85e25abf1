"""Describes how two processes of a pipeline differ that should have done the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_gpipe.core.transport.interface import BETWEEN, NO_RUN, STEP, Label

PHASES = {  # of a mini-batch, and exchanges outside of one
    0: "a forward",
    1: "a backward",
    STEP: "all forwards and backwards",
    BETWEEN: "a rehearsal of blocks (or what a log or a metric needs)",
    NO_RUN: "a step without a pipeline",
}

BY_EARLIER_STEPS = (
    " With outputs='last' a step must not go by what earlier ones have left in an object, nor one "
    "for a micro-batch by those before, since not all processes have run these: keep it as a "
    "number on the module, or count in on_train_batch_start, or write outputs='all'."
)


def difference(theirs: Label, ours: Label, them: str, us: str, pipelines: Sequence[str]) -> str:
    """Return an error message that says what the other process did, and what this one did."""
    if NO_RUN in (theirs.phase, ours.phase):  # a step without a run has no other fields
        theirs, ours = (Label(phase=label.phase, step=label.step) for label in (theirs, ours))
    details = "".join(f", {text}" for text in _others(theirs, ours))
    they, we = _described(theirs, ours, pipelines), _described(ours, theirs, pipelines)
    cure = BY_EARLIER_STEPS if ours.at_last and theirs.program != ours.program else ""
    return (
        "all processes of a pipeline must run the same mini-batches in the same order, in the same "
        f"mode and with the same random numbers: {them} runs {they}, and {us} "
        f"{we}{details}. Let each process run the same code on the same "
        f"values, with the same seed.{cure}"
    )


def _described(label: Label, other: Label, pipelines: Sequence[str]) -> str:
    """Describe a process by the fields in which the other one differs."""
    words = [PHASES[label.phase]]
    if label.pipeline != other.pipeline:
        named = pipelines[label.pipeline : label.pipeline + 1] or ["one that is not here"]
        words.append(f"of pipeline {label.pipeline} ({named[0]})")
    if label.minibatch != other.minibatch:
        later = label.minibatch > other.minibatch
        words.append(f"of {'a later' if later else 'an earlier'} mini-batch")
    if label.step != other.step:
        words.append(f"of step {label.step}")
    for name, describe in _MODES.items():
        own, others = (describe(getattr(one, name)) for one in (label, other))
        if own != others:
            words.append(own)
    return " ".join(words)


def _others(one: Label, two: Label) -> Iterator[str]:
    """Describe differences of checksums, which have no details."""
    if one.training >> _COUNT == two.training >> _COUNT and one.training != two.training:
        yield "with other modules in training mode"
    if one.program != two.program:
        yield "with other calls of layers, or other numbers in these"
    if one.state != two.state:
        yield "with the random generators in other states"


def _training(value: int) -> str:
    number = value >> _COUNT
    return f"with {number or 'no'} module{'s' * (number > 1)} in training mode"


_COUNT = 32  # the bits below the number of modules in training mode
_MODES: dict[str, Callable[[int], str]] = {
    "training": _training,
    "grad": lambda value: "with gradients" if value else "without gradients",
    "at_last": lambda value: f"with outputs for {'the last stage' if value else 'all'}",
    "microbatches": lambda value: f"in {value} micro-batch{'es' * (value != 1)}",
}
