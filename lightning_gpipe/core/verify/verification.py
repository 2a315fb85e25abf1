"""Whether a pipeline computes what its layers compute: one batch, run plain and pipelined.

A result that changes with ``chunks`` has a cause that raises no error: a layer that takes a mean
over the batch, a backward that divides by the size of the batch, a buffer that is updated in every
call. To find it by hand takes two models with equal weights and random numbers, compared layer by
layer. To compare two losses shows at most that something is wrong, and nothing about values that
the loss does not depend on.

Here the layers run on a batch both ways, and everything that a pipeline promises is compared: the
output, the gradients of all parameters and of the input, the buffers. The gradients are computed
from a random gradient of the output, so no loss is needed and none can hide a fault. Dropouts draw
other masks for each micro-batch, so they are disabled in both runs, and other layers that draw are
detected. Afterwards the state of the pipeline is restored.

A difference may have a known reason: a batch norm in training normalises by micro-batch, a layer
that draws gets other numbers, and rounding may be amplified. Any other difference is a fault of a
layer, or of this package. But if the layers do not repeat what they compute, a difference means
nothing, so before any reason is accepted the plain layers run a second time: what differs then is
reported instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gpipe.core.faithful import Context
from lightning_gpipe.core.pipeline import GPipe, Layers, Pipeline, Taken, checked
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.verify.compare import deviations, tolerance_of
from lightning_gpipe.core.verify.difference import first_difference, layer_name, not_repeated
from lightning_gpipe.core.verify.layered import Layered
from lightning_gpipe.core.verify.own_forward import differs_from_forward
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.preserved import state_preserved, without_dropout
from lightning_gpipe.core.verify.programmed import Programmed
from lightning_gpipe.core.verify.rounding import AMPLIFIED, perturbing
from lightning_gpipe.core.verify.runs import Run, Subject, run_pipelined, run_plain
from lightning_gpipe.core.verify.values import KINDS
from lightning_gpipe.core.verify.whole import Calls, Whole

__all__ = ["Parity", "verify", "verify_program", "verify_run"]


def verify(pipeline: GPipe, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Parity:
    """Run a batch through a pipeline and through its plain layers, and compare.

    Example::

        parity = verify(model, x)
        print(parity)
        parity.check()  # raises RuntimeError for a difference without a known reason

    The layers run in their training mode and in the caller's autocast; gradients are compared if
    they are enabled. Buffers, attributes of layers, generators, ``.grad`` and the pipeline are the
    same afterwards. Changes that layers make to other Python objects or to their parameters are not
    undone, and hooks on layers and parameters are called in each run.

    A plain run needs the memory of a forward and backward of the whole batch without recomputation,
    on the devices of the stages; the host keeps the outputs of all layers, and all gradients, of
    both runs. A second plain run is made only if there is a difference, and a third one only if it
    has no known reason.

    Args:
        pipeline: The pipeline.
        args, kwargs: A batch, as the pipeline is called with. Layers get copies of it. If the
            pipeline runs programs of a model, the first of each module in this call is verified,
            and then the programs are compared with the model's own forward.
        tolerance: The largest difference that counts as rounding, as a share of the largest value.
            None takes 1e-9 for float64, 1e-4 for float32 (1e-2 on CUDA, where it may be TF32) and
            5e-2 for 16 bits, by the lowest precision in use, autocast included.

    Returns:
        What was compared, and the first difference if there is one.
    """
    first = pipeline.taken[0]
    if isinstance(first, Layers) and not first.path:
        (input,) = args
        return verify_run(first, None, input, tolerance=tolerance)
    whole = Whole(first.root, pipeline.taken)
    parity = verify_call(whole, first.run, args, kwargs, tolerance=tolerance)
    if parity is None:
        raise RuntimeError(
            "a call that is verified must run the pipeline: it did not. Call it with what "
            f"makes the forward reach {', '.join(repr(each.path) for each in whole.found)}."
        )
    return parity


def verify_call(
    whole: Whole,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    tolerance: float | None = None,
) -> Parity | None:
    """Verify the first run of each pipeline in a call, and then the call against the own forward.

    Args:
        whole: The module whose forward is called.
        call: Calls it.
        args, kwargs: What with.
        tolerance: As for :func:`verify`.

    Returns:
        What was compared of the first pipeline that differs, or of the first; None if the call
        runs none.
    """
    found: dict[Taken, Parity] = {}
    calls = Calls()

    def check(taken: Taken, program: Program | None, values: Any) -> None:
        if program is not None:
            calls.see(taken, program)
        if taken not in found:
            found[taken] = verify_run(taken, program, values, tolerance=tolerance)

    with whole.exclusive():
        with state_preserved(whole), checked(whole.found, check):
            call(*args, **kwargs)
        if not found:
            return None
        worst = max(found.values(), key=_severity)
        if _severity(worst) > 1 or not calls:
            return worst
        with _saving(Context.capture(whole.devices)), _without_dropout(whole):
            difference, repeats = differs_from_forward(
                whole, call, args, kwargs, calls, tolerance, partial(state_preserved, whole)
            )
    if difference is None:
        return worst if worst.difference is not None else replace(worst, of_programs=True)
    unrepeatable = None if repeats else difference
    return replace(worst, difference=difference, unrepeatable=unrepeatable, of_programs=True)


def _severity(parity: Parity) -> int:
    if parity.difference is None:
        return 0
    return 1 if parity.explained else 2


def _without_dropout(whole: Whole) -> AbstractContextManager[None]:
    return without_dropout(whole.modules(), whole.found[0].pipeline.patches)


def verify_run(
    taken: Taken, program: Program | None, values: Any, *, tolerance: float | None = None
) -> Parity:
    """Run in micro-batches and on the whole mini-batch, and compare, as :func:`verify`.

    Args:
        taken: What runs as a pipeline.
        program: Its program; None if its layers run one after another.
        values: The values of the program's inputs, or the input of the layers.
        tolerance: As for :func:`verify`.
    """
    if program is not None:
        return verify_program(taken.pipeline, program, values, tolerance=tolerance)
    assert isinstance(taken, Layers), "it has no program"
    return _verified(Layered(taken), values, tolerance)


def verify_program(
    pipeline: Pipeline, program: Program, values: Sequence[Any], *, tolerance: float | None = None
) -> Parity:
    """Run a program in micro-batches and on the whole values, and compare, as :func:`verify`.

    Args:
        pipeline: The pipeline.
        program: The program.
        values: The values of its inputs.
        tolerance: As for :func:`verify`.
    """
    return _verified(Programmed(pipeline, program), list(values), tolerance)


def _verified(pipeline: Subject, input: Any, tolerance: float | None) -> Parity:
    context = Context.capture(pipeline.devices)
    with pipeline.engine.exclusive():
        pipeline.patches.reset()  # those that an interrupted verification left
        return _verify(pipeline, input, tolerance, context)


def _verify(pipeline: Subject, input: Any, tolerance: float | None, context: Context) -> Parity:
    with _saving(context), without_dropout(pipeline.modules(), pipeline.patches):
        with state_preserved(pipeline):
            pipelined = run_pipelined(pipeline, input)
        with state_preserved(pipeline):
            plain = run_plain(pipeline, input, pipelined.mask)
        if tolerance is None:
            tolerance = _tolerance(pipeline, plain, context)
        difference = first_difference(pipeline, plain, pipelined, tolerance)
        unrepeatable = None
        if difference is not None:
            with state_preserved(pipeline):
                again = run_plain(pipeline, input, pipelined.mask)
            unrepeatable = not_repeated(pipeline, plain, again, tolerance)
        if difference is not None and difference.reason is None and unrepeatable is None:
            with state_preserved(pipeline):
                perturbed = run_plain(pipeline, input, pipelined.mask, between=perturbing())
            left = first_difference(pipeline, plain, pipelined, tolerance, perturbed=perturbed)
            difference = left or replace(difference, reason=AMPLIFIED)
    compared = {kind: deviations(plain.values[kind], pipelined.values[kind]) for kind in KINDS}
    return Parity(
        pipelined.microbatches,
        compared,
        tolerance,
        difference,
        unrepeatable,
        tuple(f"{aside.name!r} of {layer_name(pipeline, aside.layer)}" for aside in plain.asides),
    )


def _tolerance(pipeline: Subject, plain: Run, context: Context) -> float:
    casts = {autocast.dtype for autocast in context.autocast if autocast.enabled}
    parameters = {parameter.dtype for parameter in pipeline.parameters()}
    on_cuda = any(device.type == "cuda" for device in pipeline.devices)
    return tolerance_of(casts | parameters | plain.dtypes(), on_cuda=on_cuda)


@contextmanager
def _saving(context: Context) -> Iterator[None]:
    """Apply the caller's hooks on saved tensors in a ``with`` block, except checkpointing's.

    Those count the saved tensors, and would run the caller's forward again to get them back.
    """
    pack, unpack = context.saved_tensors_hooks or (_as_is, _as_is)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _as_is(tensor: Tensor) -> Tensor:
    return tensor
