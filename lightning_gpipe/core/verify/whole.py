"""Whether the programs of a call are what the forward of the model does.

A program is made of what a front-end saw of a forward: the calls of layers, and what happens
between them. What it could not see, such as a value that a traced forward reads from a global
variable, is frozen in the program. So the model's own forward runs too, with its front-ends aside,
and is compared with the pipeline, which gets the mini-batch in one piece: then even batch norms
compute the same, and any difference is one of the programs.

The layers of the own forward stay on the devices of their stages. What they are called with is
moved there, and what they return is moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import collect_loss_terms
from lightning_gpipe.core.faithful import Write
from lightning_gpipe.core.frontends import StandIn
from lightning_gpipe.core.pipeline import Taken
from lightning_gpipe.core.plan import Program
from lightning_gpipe.core.profile import change_tensors, following
from lightning_gpipe.core.verify.runs import Generators, copied, promised, record_output
from lightning_gpipe.core.verify.values import Values, inexact, on_cpu, tensors

Call = Callable[..., Any]


class Whole(StandIn):
    """A module in whose forward pipelines run.

    Args:
        module: The module.
        found: What runs as a pipeline in it.
    """

    def __init__(self, module: nn.Module, found: Sequence[Taken]) -> None:
        super().__init__(module)
        self.found = found

    @property
    def devices(self) -> list[torch.device]:
        """The device of each worker."""
        return list(self.found[0].pipeline.layout.devices)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep no record of what runs in a ``with`` block."""
        with ExitStack() as stack:
            for taken in self.found:
                stack.enter_context(taken.pipeline.engine.unchanged())
            yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """A ``with`` block in which no other thread runs the pipelines."""
        with ExitStack() as stack:
            for taken in self.found:
                stack.enter_context(taken.pipeline.engine.exclusive())
                taken.pipeline.patches.reset()
            yield

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([self._original])


Outputs = Mapping[nn.Module, list[Any]]  # what each call of a layer returned


class Calls:
    """The calls of layers in programs."""

    def __init__(self) -> None:
        self._number: dict[nn.Module, int] = {}  # of the calls, in the order of the first of each
        self._titles: dict[nn.Module, str] = {}

    def __len__(self) -> int:
        return len(self._number)

    def see(self, taken: Taken, program: Program) -> None:
        """Add those of a program."""
        named = dict(taken.root.named_modules())
        for part in program.parts:
            for step in part.steps:
                layer = step.run if isinstance(step.run, nn.Module) else named.get(step.name)
                if layer is not None:
                    self._number[layer] = self._number.get(layer, 0) + 1
                    self._titles[layer] = f"{step.name} ({type(layer).__name__})"

    @contextmanager
    def recorded(self) -> Iterator[Outputs]:
        """A ``with`` block that yields what the layers return in it."""
        outputs: dict[nn.Module, list[Any]] = {layer: [] for layer in self._number}
        with ExitStack() as hooks:
            for layer, found in outputs.items():
                hook = partial(record_output, found)
                hooks.callback(layer.register_forward_hook(hook).remove)
            yield outputs

    def pairs(self, one: Outputs, other: Outputs) -> Iterator[tuple[str, Values, Values]]:
        """What each call returned in two runs, with what messages call its layer."""
        for layer, number in self._number.items():
            # If a forward ran twice, the outputs of the second.
            for before, after in zip(one[layer][-number:], other[layer][-number:], strict=False):
                yield self._titles[layer], inexact(before), inexact(after)


class Ran(NamedTuple):
    """One run of a call.

    Attributes:
        values: The values of each kind, as of :class:`~.runs.Run`.
        outputs: The tensors of its output, by path.
        drew: Whether random numbers were drawn.
    """

    values: Mapping[str, Values]
    outputs: Mapping[str, Tensor]
    drew: bool


def run_call(whole: Whole, call: Call, args: Any, kwargs: Any, like: Ran | None = None) -> Ran:
    """Run a call, and compute its gradients.

    Args:
        whole: What is called.
        call: Calls it.
        args, kwargs: What with.
        like: Of which run to compare the outputs; others, such as a cache, are left out.
    """
    (args, kwargs), entering = copied((args, kwargs))
    generators = Generators(whole.devices)
    with collect_loss_terms() as terms:
        outputs = tensors(call(*args, **kwargs))
    drew = generators.moved
    if like is not None:
        outputs = {path: outputs[path] for path in like.outputs if path in outputs}
    values = promised(whole, whole.devices, outputs, terms, entering, {})
    return Ran(values, on_cpu(outputs), drew)


@contextmanager
def in_one_piece(whole: Whole) -> Iterator[None]:
    """A ``with`` block in which the pipelines get mini-batches in one piece."""
    before = [taken.pipeline.chunks for taken in whole.found]
    try:
        for taken in whole.found:
            taken.pipeline.chunks = 1
        yield
    finally:
        for taken, chunks in zip(whole.found, before, strict=True):
            taken.pipeline.chunks = chunks


@contextmanager
def own_forward(whole: Whole) -> Iterator[None]:
    """A ``with`` block in which the module runs without pipelines, its layers where they are."""
    with ExitStack() as stack:
        for taken in whole.found:
            stack.enter_context(taken.plain())
            for stage in taken.pipeline.stages:
                stack.enter_context(following(stage))
        if len(set(whole.devices)) > 1:
            _let_travel(whole, stack)
        yield


def beside(whole: Whole, call: Call, *args: Any, **kwargs: Any) -> Any:
    """Make a call with its arguments where what is around the pipelines is."""
    outside = whole.found[0].pipeline.layout.outside
    args, kwargs = change_tensors((args, kwargs), lambda x: x.to(outside))
    return call(*args, **kwargs)


def _let_travel(whole: Whole, stack: ExitStack) -> None:
    """Have arguments of layers follow them to their devices, and what they return come back."""
    outside = whole.found[0].pipeline.layout.outside
    travel = _Travel(outside)
    layers = {
        module: stage.device
        for taken in whole.found
        for stage in taken.pipeline.stages
        for layer in stage.partition.layers
        for module in layer.modules()
    }
    for module, device in layers.items():
        go = partial(travel.go, device)
        stack.callback(module.register_forward_pre_hook(go, prepend=True, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(travel.come_back).remove)
    # Parameters and buffers that the forward reads itself, of modules that are on several stages.
    writes: list[Write] = [
        (slots, name, tensor.to(outside))
        for module in whole.modules()
        if module not in layers
        for slots in (module._parameters, module._buffers)
        for name, tensor in slots.items()
        if tensor is not None and tensor.device != outside
    ]
    stack.enter_context(whole.found[0].pipeline.patches.changed(writes))


class _Travel:
    """Moves what goes into the outermost layer that runs, and what comes out of it."""

    def __init__(self, outside: torch.device) -> None:
        self._outside = outside
        self._depth = 0

    def go(
        self, device: torch.device, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        moved: tuple[Any, Any] = change_tensors((args, kwargs), lambda x: x.to(device))
        return moved

    def come_back(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return output
        return change_tensors(output, lambda x: x.to(self._outside))
