"""Modules that run as pipelines, and where they are in the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import MicroBatching, PaddedSequences, Rows, change_tensors
from lightning_gpipe.core.faithful import NOTHING, is_traced
from lightning_gpipe.core.frontends import (
    RunProgram,
    check_recordable,
    frontend_of,
    heaviest,
    module_at,
)
from lightning_gpipe.core.layout import check_initialised, check_whole
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.profile import walk_program
from lightning_gpipe.core.programs import Program
from lightning_gpipe.core.schedules import ActivationCheckpointing

# Called with a piped module, its program, the values of its inputs, and the number of chunks.
Check = Callable[["PipedModule", Program, Sequence[Any], int | None], None]


class PipedModule:
    """A module that runs as a pipeline, at a path in the user's model; empty if it is the model.

    ``runs`` is the number of runs so far, and ``check`` is called before each if not None.
    ``stages`` are those of the module in its pipeline.
    """

    pipeline: Pipeline
    stages: range

    def __init__(self, root: nn.Module, path: str, module: nn.Module) -> None:
        check_whole([(path, module)])
        self.root = root
        self.path = path
        self.module = module
        check_initialised(module, self.name)
        self.runs = 0
        self.check: Check | None = None
        self._substitute: RunProgram | None = None
        self.frontend = frontend_of(root, path, module)

    def __getstate__(self) -> dict[str, Any]:
        # A front-end is for one model; a copy of the model has its own.
        return {**self.__dict__, "check": None, "frontend": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.frontend = frontend_of(self.root, self.path, self.module)

    @property
    def name(self) -> str:
        return f"{type(self.root).__name__}.{self.path}" if self.path else "module"

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """The mode of its own stages."""
        mode, stages = self.pipeline.activation_checkpointing, self.stages
        return mode if isinstance(mode, str | int) else mode[stages.start : stages.stop]

    def takes(self, balance: Sequence[Any]) -> bool:
        if all(isinstance(begin, str) for begin in balance):
            layers = {name for name, _ in self.module.named_children()}
            return {begin.removeprefix(f"{self.path}.") for begin in balance} <= layers
        counts = [size for size in balance if isinstance(size, int)]
        return sum(self.frontend.in_units(counts)) == len(self.frontend.units)

    def attach(self, pipeline: Pipeline, stages: range) -> None:
        self.pipeline, self.stages = pipeline, stages
        self.frontend.install(self._run_program, pipeline.engine)

    @contextmanager
    def watched(self, run: RunProgram) -> Iterator[None]:
        """Let calls of the cut model call ``run`` and not a pipeline, in a ``with`` block."""
        self._substitute = run
        self.frontend.install(run)
        try:
            yield
        finally:
            self.frontend.remove()
            self._substitute = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not str(type(self.root).__call__.__module__).startswith("torch."):
            raise TypeError(
                "a model in a GPipe must have no __call__ of its own, since its forward is called: "
                f"got {type(self.root).__name__}. Move what its __call__ does into forward."
            )
        if self.path:
            outside = self.pipeline.layout.outside
            args = tuple([_moved(value, outside) for value in args])
            kwargs = {name: _moved(value, outside) for name, value in kwargs.items()}
        run = self._substitute or self._run_program
        if self.frontend.takes_batch:
            return self.frontend.call(run, *args, **kwargs)
        recorded = is_traced((args, kwargs), self.root.parameters())
        if recorded:
            check_recordable(self.root)
        with self.frontend.plain() if recorded else NOTHING:
            return self.frontend.call(run, *args, **kwargs)

    def record(self, args: Any) -> Any:
        if self.frontend.takes_batch and not self.path:
            return self.frontend.call(self._run_program, args[0])
        raise TypeError(
            "torch.fx must be given a model whose arguments have names: got a GPipe around "
            f"{type(self.root).__name__}. Give it the {type(self.root).__name__} itself, which it "
            "records as without a pipeline."
        )

    def run_told(self, program: Program, values: Sequence[Any], *, chunks: int | None) -> None:
        """Run a program of which another process told this one, without the user's code."""
        with self.frontend.running():
            self._run_program(program, values, chunks=chunks)

    def _run_program(
        self, program: Program, values: Sequence[Any], *, chunks: int | None = None
    ) -> list[Any]:
        pipeline = self.pipeline
        # Other front-ends have asked.
        if self.frontend.takes_batch and is_traced(values[0], self.module.parameters()):
            _check_here(len(pipeline.stages), pipeline.layout.n)
            with pipeline.engine.exclusive():
                return walk_program(pipeline.stages, program, values)
        self.runs += 1
        if self.check is not None:
            self.check(self, program, values, chunks)
        return pipeline.run_program(
            program, values, chunks=chunks, stacked=self.frontend.takes_batch
        )


def _check_here(here: int, stages: int) -> None:
    if here < stages:
        raise RuntimeError(
            "what records a model, such as TensorBoardLogger(log_graph=True), needs all of its "
            f"stages in this process: got {here} of {stages}. Leave it out, or record the model "
            "before it is a pipeline."
        )


def _moved(value: Any, device: torch.device) -> Any:
    if type(value) is Tensor and value.device == device:
        return value  # most often
    return change_tensors(value, lambda x: x.to(device))


def piped_module_at(
    root: nn.Module, path: str | PipedModule | None, balance: Any = None
) -> PipedModule:
    """Return the piped module at a path.

    None takes the model itself, unless the balance counts or names the layers of the nn.Sequential
    or nn.ModuleList with more than half of its parameters. A piped module is returned as it is.
    """
    if isinstance(path, PipedModule):
        return path
    if not isinstance(root, nn.Module):
        raise TypeError(
            f"what runs as a pipeline must be a module: got {type(root).__name__}. Put the layers "
            "into an nn.Sequential."
        )
    if path is not None:
        return PipedModule(root, path, module_at(root, path))
    heavy = None if isinstance(root, nn.Sequential) else heaviest(root)
    if heavy is not None:
        # The heaviest nn.Sequential of a U-Net or a residual network is not what its author calls
        # layers, but a loop over blocks can seldom be traced.
        piped = PipedModule(root, *heavy)
        if isinstance(balance, list | tuple):
            if piped.takes(balance):
                return piped
        elif isinstance(piped.module, nn.ModuleList):
            return piped
    return PipedModule(root, "", root)


def piped_modules_at(root: nn.Module, paths: Any, balances: Sequence[Any]) -> list[PipedModule]:
    """Return the piped module of each path of a list, or of a single path; none within another."""
    listed = list(paths) if isinstance(paths, list | tuple) else [paths]
    pairs = zip(listed, balances, strict=True)
    modules = [piped_module_at(root, path, balance) for path, balance in pairs]
    for one, other in permutations(modules, 2):
        if other.module in one.module.modules():
            raise ValueError(
                "modules that run as pipelines must not be within one another: got "
                f"{one.path!r} and {other.path!r}. Choose one of them."
            )
    return modules


def check_entries(modules: Sequence[PipedModule], microbatching: MicroBatching | None) -> None:
    """Refuse a way to cut whole batches for layers that get other values."""
    for piped in modules:
        if piped.frontend.takes_batch:
            continue
        if isinstance(microbatching, PaddedSequences):
            raise TypeError(
                "PaddedSequences needs a batch with lengths, as an nn.Sequential is called with: "
                f"got {piped.name} ({type(piped.module).__name__}), whose layers get values of its "
                "forward. Leave out microbatching, and sort the rows of a batch by their length if "
                "most are short."
            )
        if isinstance(microbatching, Rows) and microbatching.dims:
            raise ValueError(
                f"{microbatching} is for an nn.Sequential, whose layers get what the batch is: got "
                f"{piped.name} ({type(piped.module).__name__}), whose layers get other values too, "
                "and all must have their rows in dim 0. Let the model transpose its input before "
                "its layers, with batch_first=True where they have it."
            )
