"""Compares a call of the model that runs pipelines with the model's own forward.

A value that a front-end cannot see, such as a global variable that a traced forward reads, is
frozen in the program. So the own forward, on the devices of the stages, is compared with the
pipeline on the mini-batch in one piece: even batch norms compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import inference_mode

from lightning_gpipe.core.data import change_tensors, collect_loss_terms
from lightning_gpipe.core.faithful import (
    Changes,
    Manager,
    RandomState,
    Write,
    patched,
    without_checkpointing,
)
from lightning_gpipe.core.pipeline import PipedModule
from lightning_gpipe.core.profile import following
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.verify.compare import perturbed
from lightning_gpipe.core.verify.difference import Comparison, DifferenceSearch
from lightning_gpipe.core.verify.isolation import (
    by_rows,
    in_chunks,
    isolated,
    of_micro_batches,
)
from lightning_gpipe.core.verify.named_values import OUTPUT, Values, inexact, kept_values, tensors
from lightning_gpipe.core.verify.runs import (
    Run,
    copied,
    few_rows,
    gradients_in,
    recorded,
    results,
    tolerance_for,
)

_DRAWS = "the forward draws random numbers, of which a pipeline has others"


@dataclass(eq=False)
class WholeCall:
    """A call of a module in whose forward ``piped_modules`` run, with the ``titles`` of layers.

    ``chunks`` is in how many micro-batches it was compared.
    """

    module: nn.Module
    piped_modules: Sequence[PipedModule]
    call: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    sampled: bool = False  # of a few rows

    def __post_init__(self) -> None:
        self.pipelines = [piped.pipeline for piped in self.piped_modules]
        self._layout = self.pipelines[0].layout
        self.titles: dict[nn.Module, list[str]] = {}
        self._drew = False
        self.chunks = 1

    def __call__(self) -> Any:
        return self.call(*self.args, **self.kwargs)

    def sample(self, rows: int) -> WholeCall:
        # A copy of what was made in inference mode may be used with gradients.
        with inference_mode(False):
            few = change_tensors(few_rows((self.args, self.kwargs), rows), torch.clone)
        args, kwargs = few
        return replace(self, args=args, kwargs=kwargs, sampled=True)

    def record(self, piped: PipedModule, program: Program) -> None:
        named = dict(piped.root.named_modules())
        for part in program.parts:
            for step in part.steps:
                layer = step.run if isinstance(step.run, nn.Module) else named.get(step.name)
                if layer is not None:
                    title = f"{step.name} ({type(layer).__name__})"
                    self.titles.setdefault(layer, []).append(title)

    def compare(self, tolerance: float | None = None, chunks: int = 1) -> Comparison:
        devices, modules = self._layout.devices, list(self.module.modules())
        with without_checkpointing(), by_rows(modules, sampled=self.sampled):
            self.chunks = 1 if any(map(of_micro_batches, modules)) else chunks
            with self.isolated(), in_chunks(self.pipelines, self.chunks):
                pipelined = self._run()
            plain = self._own_run(pipelined)
            tolerance = tolerance_for(tolerance, plain, self.module.parameters(), devices)
            titles = list(chain.from_iterable(self.titles.values()))
            search = DifferenceSearch(tolerance, titles, _DRAWS if self._drew else None)
            return search.compare(plain, pipelined, partial(self._own_run, pipelined))

    def isolated(self) -> Manager:
        return isolated(self.module.modules(), self.pipelines)

    def _run(self, like: Run | None = None) -> Run:
        """Make the call with copies of its arguments, and compute its gradients.

        Outputs that the run ``like`` has not, such as a cache, are left out.
        """
        arguments, leaves = copied((self.args, self.kwargs))
        if like is not None:
            arguments = change_tensors(arguments, lambda x: x.to(self._layout.outside))
        args, kwargs = arguments
        before = RandomState.capture(self._layout.devices)
        layers = {x for pipeline in self.pipelines for y in pipeline.stages for x in y.modules}
        named = [(name, x) for name, x in self.module.named_modules() if x in layers]
        changes = Changes(layers)
        with recorded(self.titles) as calls, collect_loss_terms():
            outputs = tensors(self.call(*args, **kwargs))
        self._drew = bool(before.differences())
        if like is not None:
            outputs = {path: outputs[path] for path in like.values[OUTPUT] if path in outputs}
        units: list[Values | None] = []
        for titles, of_layer in zip(self.titles.values(), calls, strict=True):
            latest = of_layer[-len(titles) :]  # if a forward ran twice, those of the second
            units += [*map(inexact, latest), *[None] * (len(titles) - len(latest))]
        devices = self._layout.devices
        compared = gradients_in(self.module, sampled=self.sampled)
        values = results(self.module, devices, outputs.items(), leaves, {}, {}, compared)
        return Run(values, units, kept=kept_values(changes, named))

    def _own_run(self, pipelined: Run, perturb: bool = False) -> Run:
        with self.isolated(), ExitStack() as stack:
            for piped in self.piped_modules:
                stack.enter_context(piped.frontend.plain())
                for stage in piped.pipeline.stages:
                    stack.enter_context(following(stage))
            if len(set(self._layout.devices)) > 1:
                self._move_between_devices(stack)
            if perturb:
                stack.enter_context(perturbed(self.titles))
            return self._run(pipelined)

    def _move_between_devices(self, stack: ExitStack) -> None:
        outside = self._layout.outside
        depth = 0  # of calls of layers within one another; the outermost moves values

        def enter(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            return change_tensors((args, kwargs), lambda x: x.to(device)) if depth == 1 else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            nonlocal depth
            depth -= 1
            return change_tensors(output, lambda x: x.to(outside)) if depth == 0 else None

        layers = {
            module: stage.device
            for pipeline in self.pipelines
            for stage in pipeline.stages
            for module in stage.modules
        }
        for module, device in layers.items():
            hook = partial(enter, device)
            before = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        # Parameters and buffers that the forward reads itself, of modules on several stages.
        writes: list[Write] = [
            (slots, name, tensor.to(outside))
            for module in self.module.modules()
            if module not in layers
            for slots in (module._parameters, module._buffers)
            for name, tensor in slots.items()
            if tensor is not None and tensor.device != outside
        ]
        stack.enter_context(patched(writes))
