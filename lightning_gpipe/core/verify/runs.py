"""One run of the layers, plain or pipelined, and its results.

Gradients are computed from a random *cotangent* of the output, the same for both runs, instead of
the gradient of a loss. They are computed by ``torch.autograd.grad``, for copies of the input, so
nothing is accumulated, and nothing flows into the caller's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import Rows, collect_loss_terms
from lightning_gpipe.core.faithful import LibraryGenerators, add_note, default_generator
from lightning_gpipe.core.profile import change_tensors, walk
from lightning_gpipe.core.verify.asides import Aside, kept_aside
from lightning_gpipe.core.verify.layered import Layered
from lightning_gpipe.core.verify.programmed import Programmed
from lightning_gpipe.core.verify.values import (
    BUFFERS,
    GRADIENTS,
    INPUT_GRADIENTS,
    LOSS_TERMS,
    OUTPUT,
    Mask,
    Values,
    computed,
    inexact,
    merged,
    on_cpu,
    only,
    tensors,
    values,
)

Subject = Layered | Programmed  # what is verified


@dataclass(frozen=True)
class Run:
    """The results of one run.

    Attributes:
        values: The values of each kind: the output and the gradients of the input by their paths,
            buffers and gradients of parameters by their names.
        layers: The floating-point tensors that each layer returned, by path; None if those of the
            micro-batches cannot be merged.
        drew: The layers that drew random numbers; recorded by a plain run only.
        microbatches: The number of micro-batches.
        mask: Which elements of the output are compared; recorded by a pipelined run only.
        asides: The loss terms that layers kept in attributes; recorded by a plain run only.
        term_layers: The layers that handed out each loss term; recorded by a plain run only.
    """

    values: Mapping[str, Values]
    layers: list[Values | None]
    drew: frozenset[int] = frozenset()
    microbatches: int = 1
    mask: Mask = field(default_factory=dict)
    asides: tuple[Aside, ...] = ()
    term_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def dtypes(self) -> set[torch.dtype]:
        """The types of all values."""
        groups = [group for group in (*self.values.values(), *self.layers) if group is not None]
        found = chain.from_iterable(group.values() for group in groups)
        return {tensor.dtype for tensor in found if tensor is not None}


def run_pipelined(pipeline: Subject, input: Any) -> Run:
    """Run the pipeline."""
    x, entering = copied(input)
    seen: list[list[Any]] = [[] for _ in pipeline]
    with ExitStack() as hooks:
        for layer, outputs in zip(pipeline, seen, strict=True):
            if isinstance(pipeline, Programmed):
                continue  # a stage has no one output
            hooks.callback(layer.register_forward_hook(partial(record_output, outputs)).remove)
        with collect_loss_terms() as terms:
            output = pipeline.run(x)
    assert pipeline.timeline is not None, "a mini-batch has run"
    m = pipeline.timeline.schedule.m
    seen = [outputs[-m:] for outputs in seen]  # if forward ran twice, those of the second run
    by_rows = type(pipeline.microbatching) is Rows
    mask = {} if by_rows else computed(pipeline.microbatching, seen[-1], on_cpu(input))
    layers = [merged(outputs) if by_rows and outputs else None for outputs in seen]
    found = promised(pipeline, pipeline.devices, output, terms, entering, mask)
    return Run(found, layers, microbatches=m, mask=mask)


def run_plain(
    pipeline: Subject,
    input: Any,
    mask: Mask,
    *,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Run:
    """Run the layers one after another on the whole batch, each on its stage's device.

    Args:
        pipeline: Whose layers to run.
        input: The batch.
        mask: Which elements of the output are compared.
        between: A function to apply to each tensor that a layer returns.
    """
    x, entering = copied(input)
    seen: list[Values | None] = []
    drew = set()
    terms: dict[str, Tensor] = {}
    term_layers: dict[str, list[int]] = {}
    kind, device_of = "layer", _devices_of_layers(pipeline)
    if isinstance(pipeline, Programmed):
        kind, device_of = "stage", pipeline.device_of()

    def visit(k: int, layer: Callable[[Any], Any], x: Any) -> Any:
        generators = Generators([device_of[k]])
        with _annotated(kind, k), collect_loss_terms() as found:
            y = layer(x)
        for name, value in found.items():
            terms[name] = terms[name] + value if name in terms else value
            term_layers.setdefault(name, []).append(k)
        if generators.moved:
            drew.add(k)
        if between is not None:
            y = change_tensors(y, between)
        seen.append(inexact(on_cpu(y)))
        return y

    if isinstance(pipeline, Programmed):
        output: Any = pipeline.walk(x, visit)
    else:
        output = walk(pipeline.stages, x, visit)
    asides = tuple(kept_aside(list(pipeline), output))  # backward may free their graphs
    found = promised(pipeline, pipeline.devices, output, terms, entering, mask)
    return Run(found, seen, frozenset(drew), asides=asides, term_layers=term_layers)


# What goes into the layers.


def copied(input: Any) -> tuple[Any, dict[str, Tensor]]:
    """A copy of the input that layers may edit, and the leaves that will have its gradients."""
    leaves = change_tensors(input, lambda x: x.detach().requires_grad_(x.requires_grad))
    entering = {path: leaf for path, leaf in tensors(leaves).items() if leaf.requires_grad}
    return change_tensors(leaves, torch.clone), entering


# Where the layers run.


@contextmanager
def _annotated(kind: str, k: int) -> Iterator[None]:
    """Add a note with the layer or stage to an error in a ``with`` block."""
    try:
        yield
    except BaseException as error:
        add_note(
            error, f"raised in {kind} {k}, which ran on the whole batch to verify the pipeline"
        )
        raise


def _devices_of_layers(pipeline: Subject) -> Mapping[int, torch.device]:
    return {k: stage.device for stage in pipeline.stages for k in stage.partition.indices}


class Generators:
    """The generators of PyTorch, of the CPU and of some devices, of NumPy and of Python.

    Args:
        devices: The devices.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = {torch.device("cpu"), *devices}
        self._states = self._now()
        self._library = LibraryGenerators().get_state()

    @property
    def moved(self) -> bool:
        """Whether any was drawn from, or set, since."""
        same = all(map(torch.equal, self._states, self._now()))
        return not same or bool(LibraryGenerators().moved(self._library))

    def _now(self) -> list[Tensor]:
        return [default_generator(device).get_state() for device in self._devices]


# What comes out of them.


def record_output(outputs: list[Any], layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook that records what a layer returned."""
    outputs.append(on_cpu(output))


def promised(
    module: nn.Module,
    devices: Sequence[torch.device],
    output: Any,
    terms: dict[str, Tensor],
    entering: dict[str, Tensor],
    mask: Mask,
) -> dict[str, Values]:
    """The values of all kinds after a forward that returned ``output`` and handed out ``terms``."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = _gradients(devices, output, [*parameters.values(), *entering.values()], mask)
    return {
        OUTPUT: only(mask, values(on_cpu(output))),
        GRADIENTS: dict(zip(parameters, gradients, strict=False)),
        BUFFERS: on_cpu(dict(module.named_buffers())),
        INPUT_GRADIENTS: dict(zip(entering, gradients[len(parameters) :], strict=True)),
        LOSS_TERMS: on_cpu(terms),
    }


def _gradients(
    devices: Sequence[torch.device], output: Any, sources: list[Tensor], mask: Mask
) -> list[Tensor | None]:
    roots = {path: leaf for path, leaf in tensors(output).items() if leaf.requires_grad}
    if not roots or not sources:
        return [None] * len(sources)
    with without_autocast(devices):
        gradients = torch.autograd.grad(
            list(roots.values()), sources, _cotangents(roots, mask), allow_unused=True
        )
    return [None if gradient is None else on_cpu(gradient) for gradient in gradients]


@contextmanager
def without_autocast(devices: Sequence[torch.device]) -> Iterator[None]:
    """A ``with`` block like a user's backward, which runs after the autocast of forward."""
    with ExitStack() as stack:
        for device_type in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _cotangents(roots: Mapping[str, Tensor], mask: Mask) -> list[Tensor]:
    """A random tensor for each root, the same in every call."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = {
        path: torch.randn(
            root.shape,
            generator=generator,
            dtype=torch.complex128 if root.is_complex() else torch.float64,
            device="cpu",
        )
        for path, root in roots.items()
    }
    masked = only(mask, drawn).values()
    return [cotangent.to(root) for cotangent, root in zip(masked, roots.values(), strict=True)]
