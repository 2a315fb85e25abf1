"""Verifies that a pipeline computes what its layers compute: one batch, run plain and pipelined.

A result that changes with ``chunks`` may have a cause that raises no error, such as a mean over the
batch. So everything that a pipeline promises is compared: output, gradients, buffers. The gradients
come from a random gradient of the output, so no loss is needed and none can hide a fault. Dropouts
are disabled, as they draw other masks for each micro-batch; other layers that draw are detected.

A difference may have a known reason: a batch norm in training, a layer that draws, amplified
rounding. Any other is a fault of a layer, or of this package. Before any reason is accepted, the
plain layers run a second time: a layer that does not repeat what it computes is reported instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import inference_mode  # not the one that Lightning may replace

from lightning_gpipe.core.faithful import (
    NOTHING,
    Attributes,
    Journal,
    Manager,
    is_traced,
    patched,
    without_checkpointing,
)
from lightning_gpipe.core.pipeline import GPipe, PipedModule, Pipeline
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.verify.difference import (
    Comparison,
    DifferenceSearch,
    Rerun,
    UnitSearch,
    most_exact,
)
from lightning_gpipe.core.verify.isolation import by_rows, exclusive, in_chunks, isolated
from lightning_gpipe.core.verify.named_values import unpacked
from lightning_gpipe.core.verify.own_forward import WholeCall
from lightning_gpipe.core.verify.parity import Parity
from lightning_gpipe.core.verify.runs import (
    SAMPLED,
    Run,
    run_pipelined,
    run_plain,
    run_together,
    sample_of,
    tolerance_for,
)
from lightning_gpipe.core.verify.subject import VerifiedProgram


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

    A pipeline over processes runs the batch in a single micro-batch in place of plain layers. All
    processes call this together, and get the same result.

    Args:
        pipeline: The pipeline.
        args, kwargs: A batch, as the pipeline is called with. Layers get copies of it. If the
            pipeline runs programs of a model, the first of each module in this call is verified,
            and then the programs are compared with the model's own forward.
        tolerance: The largest difference that counts as rounding, as a share of the largest value.
            None takes 1e-9 for float64, 1e-4 for float32 (1e-2 on CUDA, where it may be TF32) and
            5e-2 for 16 bits, by the lowest precision in use, autocast included.

    Returns:
        The comparison, with the first difference if there is one.
    """
    modules = pipeline.piped_modules
    call = WholeCall(modules[0].root, modules, modules[0].run, args, kwargs)
    parity = verify_call(call, tolerance=tolerance)
    if parity is None:
        raise RuntimeError(
            "a call that is verified must run the pipeline: it did not. Call it with what "
            f"makes the forward reach {', '.join(repr(piped.path) for piped in modules)}."
        )
    return parity


def verify_call(call: WholeCall, *, tolerance: float | None = None) -> Parity | None:
    """Verify the first run of each pipeline in a call, and then the call against the own forward.

    Returns the result for the first pipeline that differs, or for the first; None if none has run.
    """
    parities: dict[PipedModule, Parity] = {}

    def check(piped: PipedModule, program: Program, values: Sequence[Any], *_: Any) -> None:
        # Its program was recorded from a forward, which one process cannot run.
        if not (piped.frontend.takes_batch or piped.pipeline.layout.spread):
            call.record(piped, program)
        if piped not in parities:
            parities[piped] = verify_run(
                piped, program, values, tolerance=tolerance, sampled=call.sampled
            )
        if len(parities) == len(call.piped_modules) and not call.titles:
            raise _AllVerified

    with exclusive(call.pipelines):
        checks = patched((Attributes(x), "check", check) for x in call.piped_modules)
        with call.isolated(), checks, suppress(_AllVerified):
            call()
        if not parities:
            return None
        worst = max(parities.values(), key=lambda each: (each.faulty, each.difference is not None))
        if worst.faulty or not call.titles:
            return worst
        comparison = call.compare(tolerance)
    if comparison.difference is not None:
        return replace(worst, **comparison._asdict(), of_programs=True)
    return worst if worst.difference is not None else replace(worst, of_programs=True)


def verify_sample(call: WholeCall) -> Parity | None:
    """Compare the first rows of a call, in two micro-batches, with the module's own forward.

    Returns None unless there surely is a fault.
    """
    call = call.sample(2 * SAMPLED)
    chunks = min(2, max(pipeline.chunks for pipeline in call.pipelines))
    sampled: Parity | None = None
    with exclusive(call.pipelines), in_chunks(call.pipelines, 2), suppress(Exception):
        comparison = call.compare(chunks=chunks)
        sampled = Parity(call.chunks, *comparison, of_programs=call.chunks == 1)
        if sampled.surely_faulty:
            with _gradients():
                parity = verify_call(call)
            if parity is not None and parity.surely_faulty:
                sampled = parity
    return _if_faulty(sampled)


class _AllVerified(BaseException):
    """Ends a call after its last run that is verified."""


def verify_run(
    piped: PipedModule,
    program: Program,
    values: Sequence[Any],
    *,
    tolerance: float | None = None,
    sampled: bool = False,
) -> Parity:
    """Verify one run of a module that runs as a pipeline, with these values as inputs."""
    layers = piped.module if piped.frontend.takes_batch else None
    subject = VerifiedProgram(piped.pipeline, program, layers, sampled=sampled)
    return verify_program(subject, unpacked(values), tolerance)


def verify_run_sample(piped: PipedModule, program: Program, values: Sequence[Any]) -> Parity | None:
    """Compare the layers on the first rows of their only input, in two micro-batches.

    Returns None unless there surely is a fault.
    """
    pipeline = piped.pipeline
    if pipeline.chunks == 1:
        return None
    parity: Parity | None = None
    with in_chunks([pipeline], 2), suppress(Exception):
        few = sample_of(unpacked(values), pipeline.microbatching)
        parity = verify_run(piped, program, [few], sampled=True)
        difference = parity.difference
        if difference is not None and difference.deviation.of_a_number:
            return None  # outputs without dims are stacked, which a warning tells
    return _if_faulty(parity)


def _if_faulty(parity: Parity | None) -> Parity | None:
    """Return the result if there surely is a fault; else warn of what layers keep."""
    if parity is None or parity.surely_faulty:
        return parity
    parity.warn_of_kept()
    return None


def verify_program(subject: VerifiedProgram, input: Any, tolerance: float | None = None) -> Parity:
    """Run a program in micro-batches and unit by unit, and compare; several inputs are a list."""
    pipeline, module = subject.pipeline, subject.module
    run = run_together if pipeline.layout.spread else run_plain

    def rerun(perturb: bool) -> Run:
        with isolated(module.modules(), [pipeline]):
            return run(subject, input, pipelined.mask, perturb=perturb)

    with (
        exclusive([pipeline]),
        without_checkpointing(),
        by_rows(module.modules(), sampled=subject.sampled),
    ):
        with isolated(module.modules(), [pipeline]):
            pipelined = run_pipelined(subject, input)
        plain = rerun(False)
        tolerance = tolerance_for(tolerance, plain, module.parameters(), subject.devices)
        search = UnitSearch(subject, tolerance)
        comparison = compare_everywhere(pipeline, search, plain, pipelined, rerun)
    return Parity(pipelined.microbatches, *comparison)


def compare_everywhere(
    pipeline: Pipeline, search: DifferenceSearch, plain: Run, other: Run, rerun: Rerun
) -> Comparison:
    """Compare two runs in all processes, which make more plain runs if any finds a difference."""
    layout, everywhere = pipeline.layout, pipeline.engine.everywhere
    if not layout.spread:
        return search.compare(plain, other, rerun)
    stages = {layout.owner_of(j): j for j in range(layout.n)}.values()
    differs = search.first(plain, other) is not None
    reruns = {}
    differing = [everywhere(j, lambda: differs) for j in stages]
    if any(differing):
        reruns = {perturb: rerun(perturb) for perturb in (False, True)}
    own = search.compare(plain, other, reruns.__getitem__)
    return most_exact([everywhere(j, lambda: own) for j in stages])


class FirstBatchVerifier:
    """Verifies the first run of each pipeline of a model, in training mode with gradients.

    If not ``trains``, the first one in evaluation mode, with gradients or without. A module whose
    forward makes the programs is verified with its whole call, if it is called; not where another
    module loops over its blocks. ``sample``: verify a few rows of an nn.Sequential's input, or of a
    whole call, and give ``on_result`` only differences; what hooks on layers leave on ``around``,
    the caller's module, is put back.
    """

    def __init__(
        self,
        modules: Sequence[PipedModule],
        on_result: Callable[[Parity], None],
        *,
        sample: bool = False,
        around: nn.Module | None = None,
        trains: bool = True,
    ) -> None:
        self._modules = modules
        self._trains = trains
        self._on_result = on_result
        self._sample = sample
        self._around = around
        self._done: set[PipedModule] = set()
        frontends = [piped.frontend for piped in modules if not piped.frontend.takes_batch]
        self._handles = {
            owner: owner.register_forward_pre_hook(self._before_call, with_kwargs=True)
            for owner in dict.fromkeys(frontend.owner for frontend in frontends)
        }
        self._forwards = {owner: vars(owner).get("forward") for owner in self._handles}
        checked = [piped for piped in modules if piped.frontend.takes_batch or not sample]
        self._checks = Journal()  # there may be others before and after, of another mode
        self._checks.write((Attributes(piped), "check", self._before_run) for piped in checked)

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._checks.undo()

    def _concerns(self, module: nn.Module) -> bool:
        if self._trains:
            return module.training and torch.is_grad_enabled()
        return not module.training

    def _isolated(self) -> Manager:
        if self._around is None:
            return NOTHING
        return isolated(self._around.modules(), [piped.pipeline for piped in self._modules])

    def _before_call(self, owner: nn.Module, args: Any, kwargs: Any) -> None:
        forward = vars(owner).get("forward")
        if isinstance(forward, FunctionType) and forward is not self._forwards[owner]:
            return  # no call: within DDP, Lightning runs training_step in place of the forward
        of_owner = [piped for piped in self._modules if piped.frontend.owner is owner]
        new = [piped for piped in of_owner if piped not in self._done]
        if any(piped.pipeline.engine.synchronises for piped in new):
            return  # its own forward cannot normalise by the rows of all replicas
        if not new or not self._concerns(owner) or is_traced((args, kwargs), owner.parameters()):
            return
        self._done.update(new)
        run = partial(_forward_of, owner)  # installed or not, whichever it is by then
        call = WholeCall(owner, new, run, args, kwargs)
        with self._isolated():
            parity = verify_sample(call) if self._sample else verify_call(call)
        if parity is not None:
            self._handles[owner].remove()
            self._on_result(parity)
        elif not self._sample:  # a call without them
            self._done.difference_update(new)

    def _before_run(
        self, piped: PipedModule, program: Program, values: Sequence[Any], *_: Any
    ) -> None:
        if piped not in self._done and self._concerns(piped.module):
            self._done.add(piped)
            verify = verify_run_sample if self._sample else verify_run
            with self._isolated(), _gradients():
                parity = verify(piped, program, values)
            if parity is not None:
                self._on_result(parity)


@contextmanager
def _gradients() -> Iterator[None]:
    """Compute gradients in evaluation, too: outputs that may have one are compared."""
    with inference_mode(False), torch.enable_grad():
        yield


def _forward_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)
