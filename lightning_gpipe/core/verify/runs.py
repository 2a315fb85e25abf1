"""Runs a program plain and pipelined, and records the results.

Gradients are computed by ``torch.autograd.grad`` from a random *cotangent* of the output, the same
for both runs, for copies of the input: nothing is accumulated, or flows into the caller's graph.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import (
    MicroBatching,
    Rows,
    change_tensors,
    collect_loss_terms,
    is_whole,
    map_nodes,
    may_have_rows,
)
from lightning_gpipe.core.faithful import NOTHING, Context, RandomState, add_note
from lightning_gpipe.core.run import leaves_behind
from lightning_gpipe.core.verify.compare import perturbed, perturbing, tolerance_of
from lightning_gpipe.core.verify.isolation import in_chunks
from lightning_gpipe.core.verify.named_values import (
    BUFFERS,
    GRADIENTS,
    INPUT_GRADIENTS,
    LOSS_TERMS,
    OUTPUT,
    Mask,
    Values,
    computed,
    inexact,
    masked,
    merged,
    on_cpu,
    tensors,
    unpacked,
)
from lightning_gpipe.core.verify.subject import VerifiedProgram

SOME = -1  # in the place of the units that drew random numbers, if they are not known
SAMPLED = 2  # rows of each of two micro-batches
_THIN = 4096  # elements of a gradient, if it is thin
Gradients = Literal["all", "thin", "none"]  # that are compared


@dataclass(frozen=True)
class Run:
    """The results of one run."""

    values: Mapping[str, Values]  # of each kind, by path or name, in the order of search
    units: Sequence[Values | None] = ()  # inexact tensors of each unit; None if not merged
    drew: frozenset[int] = frozenset()  # the units that drew random numbers, or SOME
    term_units: Mapping[str, Sequence[int]] = field(default_factory=dict)
    microbatches: int = 1
    mask: Mask = field(default_factory=dict)  # the elements of the output that are compared
    kept: Values = field(default_factory=dict)  # what the layers have left in attributes


def run_pipelined(subject: VerifiedProgram, input: Any, mask: Mask | None = None) -> Run:
    """Run the program in micro-batches; its ``mask`` is computed unless there is one."""
    x, leaves = copied(input)
    kept = subject.kept()
    with recorded(unit.module for unit in subject.units) as outputs, collect_loss_terms() as terms:
        output = subject.run(x)
    engine, timeline = subject.pipeline.engine, subject.pipeline.engine.timeline
    assert timeline is not None, "a mini-batch has run"
    m = timeline.schedule.m
    outputs = [of_unit[-m:] for of_unit in outputs]  # if forward ran twice, those of the second
    microbatching = subject.pipeline.microbatching
    by_rows = type(microbatching) is Rows
    if mask is None:
        compute = partial(computed, microbatching, outputs[-1], on_cpu(input))
        mask = {} if by_rows else engine.everywhere(engine.layout.n - 1, compute)
    # Nothing is recorded of the module of a stage, which is never called, and of other processes.
    units = [merged(of_unit) if by_rows and of_unit else None for of_unit in outputs]
    values = _results_of(subject, output, leaves, terms, mask)
    return Run(values, units, microbatches=m, mask=mask, kept=kept())


def run_together(subject: VerifiedProgram, input: Any, mask: Mask, *, perturb: bool = False) -> Run:
    """Run the program on the whole batch in its processes, with rounding errors added or not."""
    before = RandomState.capture(subject.devices)
    changes = perturbed(subject.pipeline.layout.layers) if perturb else NOTHING
    with in_chunks([subject.pipeline], 1), changes:
        run = run_pipelined(subject, input, mask)
    return replace(run, drew=frozenset([SOME] if before.differences() else ()))


def run_plain(subject: VerifiedProgram, input: Any, mask: Mask, *, perturb: bool = False) -> Run:
    """Run the units one after another on the whole batch, each on its stage's device.

    With ``perturb``, rounding errors are added to their outputs.
    """
    change = perturbing()
    x, leaves = copied(input)
    units: list[Values | None] = []
    drew = set()
    terms: dict[str, Tensor] = {}
    term_units: dict[str, list[int]] = {}
    kept = subject.kept()

    def visit(k: int, run: Callable[[Any], Any], needed: Mapping[int, Any]) -> Mapping[int, Any]:
        before = RandomState.capture([subject.device_of(k)])
        try:
            with collect_loss_terms() as terms_of_unit:
                made = run(needed)
        except BaseException as error:
            unit = f"{subject.kind} {k}"
            add_note(
                error, f"raised in {unit}, which ran on the whole batch to verify the pipeline"
            )
            raise
        for name, value in terms_of_unit.items():
            terms[name] = terms[name] + value if name in terms else value
            term_units.setdefault(name, []).append(k)
        if before.differences():
            drew.add(k)
        if perturb:
            made = change_tensors(made, change)
        units.append(inexact(on_cpu(unpacked(list(made.values())))))
        return made

    output = subject.walk(x, visit)
    values = _results_of(subject, output, leaves, terms, mask)
    return Run(values, units, frozenset(drew), term_units=term_units, kept=kept())


def _results_of(
    subject: VerifiedProgram,
    output: Any,
    leaves: Mapping[str, Tensor],
    terms: Mapping[str, Tensor],
    mask: Mask,
) -> dict[str, Values]:
    compared = gradients_in(subject.module, sampled=subject.sampled)
    named = subject.named(output)
    return results(subject.module, subject.devices, named, leaves, terms, mask, compared)


def gradients_in(module: nn.Module, *, sampled: bool) -> Gradients:
    """Return which gradients are compared; a sample in evaluation needs no memory for them."""
    if not sampled:
        return "all"
    return "thin" if module.training else "none"


def copied(input: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a copy of the input that layers may edit, and the leaves that get its gradients."""
    tree = change_tensors(input, lambda x: x.detach().requires_grad_(x.requires_grad))
    leaves = {path: leaf for path, leaf in tensors(tree).items() if leaf.requires_grad}
    return change_tensors(tree, torch.clone), leaves


def sample_of(batch: Any, microbatching: MicroBatching) -> Any:
    """Return the first rows of a batch, or the first of as many micro-batches as have so few.

    An even number if possible: outputs of other sizes may raise an error when they are merged.
    """
    division = microbatching.division([batch])
    if division is None:
        return few_rows(batch, 2 * SAMPLED)
    [rows] = division.sizes
    numbers = [math.ceil(rows / (2 * SAMPLED)), *range(rows // (2 * SAMPLED), 0, -1)]
    even = (number for number in numbers if math.ceil(rows / number) % 2 == 0)
    return microbatching.split(batch, next(even, numbers[0]))[0]


def few_rows(arguments: Any, rows: int) -> Any:
    """Return the first rows of all that has as many as the first tensor: also lists and arrays."""
    first = next((value for value in tensors(arguments).values() if value.dim()), ())

    def few(_: str, value: Any) -> Any:
        counted = not is_whole(value) and (not isinstance(value, Tensor) or value.dim() > 0)
        return value[:rows] if counted and len(value) == len(first) else value

    return map_nodes(few, arguments, may_have_rows)


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[list[list[Any]]]:
    """Record the output of each call of each module in a ``with`` block."""

    def record(outputs: list[Any], module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(on_cpu(output))

    outputs: list[list[Any]] = []
    with ExitStack() as hooks:
        for module in modules:
            outputs.append([])
            hooks.callback(module.register_forward_hook(partial(record, outputs[-1])).remove)
        yield outputs


def results(
    module: nn.Module,
    devices: Sequence[torch.device],
    output: Iterable[tuple[str, Any]],
    leaves: Mapping[str, Tensor],
    terms: Mapping[str, Tensor],
    mask: Mask,
    compared: Gradients,
) -> dict[str, Values]:
    """Return the values of all kinds after a forward of a module on some devices."""
    roots: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for path, leaf in output:
        if isinstance(leaf, Tensor):
            outputs[path] = on_cpu(leaf)
            if leaf.requires_grad and compared != "none":
                roots[path] = leaf
        elif isinstance(leaf, bool | int | float):
            outputs[path] = torch.tensor(leaf, dtype=torch.float64, device="cpu")
    named = module.named_parameters()
    parameters = {name: p for name, p in named if p.requires_grad and not p.is_meta}
    sources = [*parameters.values(), *leaves.values()]
    cotangents = _cotangents(roots, mask)
    thin = compared == "thin"
    gradients = gradients_of(list(roots.values()), sources, cotangents, devices, thin=thin)
    return {
        OUTPUT: masked(outputs, mask),
        GRADIENTS: dict(zip(parameters, gradients, strict=False)),
        BUFFERS: on_cpu({name: x for name, x in module.named_buffers() if not x.is_meta}),
        INPUT_GRADIENTS: dict(zip(leaves, gradients[len(parameters) :], strict=False)),
        LOSS_TERMS: on_cpu(terms),
    }


def gradients_of(
    roots: Sequence[Tensor],
    sources: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    devices: Iterable[torch.device],
    *,
    thin: bool = False,
) -> list[Tensor | None]:
    """Return the gradients, on the CPU, by a backward after the autocast of forward.

    If ``thin``, only some elements of each are kept: those of a large model fill the host.
    """
    if not roots:
        return [None] * len(sources)
    trained = [source for source in sources if source.requires_grad]  # a step may freeze some
    # In a process whose stage has no parameters, too, the backward must go through the pipeline.
    known = set(map(id, trained))
    computed_by_caller = {x.grad_fn for x in trained if x.grad_fn is not None}  # functional_call
    behind = leaves_behind(roots, until=computed_by_caller)
    others = [leaf for leaf in behind if id(leaf) not in known]
    if not trained and not others:
        return [None] * len(sources)
    with Context.capture(devices).without_autocast().entered(), warnings.catch_warnings():
        # What layers keep is not in this loss.
        warnings.filterwarnings("ignore", message=r"torch\.autograd\.grad and backward\(")
        leaves = [*trained, *others]
        gradients = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    of_each = dict(zip(map(id, trained), gradients, strict=False))
    found = [of_each.get(id(source)) for source in sources]
    parts = [x.flatten()[:: 1 + x.numel() // _THIN] if thin and x is not None else x for x in found]
    return [None if x is None else on_cpu(x) for x in parts]


def _cotangents(roots: Mapping[str, Tensor], mask: Mask) -> list[Tensor]:
    """Return a random tensor for each root, the same in every call."""
    generator = torch.Generator("cpu").manual_seed(0)
    draw = partial(torch.randn, generator=generator, device="cpu")
    drawn = {
        path: draw(root.shape, dtype=torch.complex128 if root.is_complex() else torch.float64)
        for path, root in roots.items()
    }
    return [
        cotangent.to(root)
        for cotangent, root in zip(masked(drawn, mask).values(), roots.values(), strict=True)
    ]


def tolerance_for(
    tolerance: float | None, run: Run, parameters: Iterable[Tensor], devices: Sequence[torch.device]
) -> float:
    """Return the tolerance; None is the lowest precision of autocast, parameters and a run."""
    if tolerance is not None:
        return tolerance
    casts = {cast.dtype for cast in Context.capture(devices).autocast if cast.enabled}
    groups = [*run.values.values(), *filter(None, run.units)]
    values = {value.dtype for group in groups for value in group.values() if value is not None}
    dtypes = casts | {parameter.dtype for parameter in parameters} | values
    return tolerance_of(dtypes, on_cuda=any(device.type == "cuda" for device in devices))
