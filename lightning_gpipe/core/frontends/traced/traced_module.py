"""The front-end for any module: its forward is traced, cut, and run as a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from typing_extensions import override

from lightning_gpipe.core.faithful import NOTHING, Manager, is_traced, patched
from lightning_gpipe.core.frontends.frontend import Frontend, OwnerProcesses, RunProgram
from lightning_gpipe.core.frontends.install import check_free, check_recordable, install
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward, trace
from lightning_gpipe.core.frontends.traced.call_kinds import CallKind, check_constants
from lightning_gpipe.core.frontends.traced.inplace_edits import rename
from lightning_gpipe.core.frontends.traced.lowering import LoweredProgram, lower
from lightning_gpipe.core.frontends.traced.ownership import Ownership, Unit, units_of
from lightning_gpipe.core.frontends.traced.stage_modules import StageModules
from lightning_gpipe.core.frontends.traced.traced_attributes import AssumedAttributes
from lightning_gpipe.core.frontends.traced.watching import Modes
from lightning_gpipe.core.layout import Partition, check_balance

_KINDS = 64  # the most programs in memory
_MANY = 16  # the number of traces that is a surprise


class TracedForward(Frontend):
    """Traces the forward at ``path`` once for each kind of call, or raises UnsupportedForward."""

    _stage_modules: StageModules
    _programs: _Programs

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__(model, path)
        self._name = f"{type(model).__name__}.{path}" if path else type(model).__name__
        check_free(self._module, self._name)
        self._warned: set[str] = set()
        self._own_forward = self._module.__dict__.get("forward")
        self._graphs = self._first_graphs()
        self._units = units_of(self._graphs[0])
        if not self._units:
            raise UnsupportedForward(
                f"{self._name} must call modules in its forward, between which it can be cut: got "
                "none. Pipeline the module that holds it."
            )

    @property
    @override
    def units(self) -> Sequence[str]:
        return [f"{self._prefix}{unit.calls[0].target}" for unit in self._units]

    @property
    @override
    def unit_modules(self) -> Iterable[nn.Module]:
        return (_modules_of(self._graphs[0], unit) for unit in self._units)

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        try:
            check_balance(balance, len(self._units), self._name)
        except ValueError as error:
            for module, why in self._graphs[0].whole.items():
                error.add_note(f"{type(module).__name__} is one layer: {why}")
            raise
        self._programs = _Programs()  # programs of another cut are for other stages
        own = Ownership.cut(self._graphs[0], self._units, balance)
        for graph in self._graphs[1:]:
            own.extend(graph)
        self._stage_modules = StageModules(self._graphs, own, self._prefix)
        for graph in self._graphs:
            lower(graph, self._stage_modules)  # refuses what cannot be cut there
        return self._placed(self._stage_modules.partitions)

    @override
    def install(self, run: RunProgram, processes: OwnerProcesses | None = None) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced((args, kwargs), self._module.parameters()):
                check_recordable(self._module)
                return self._forward(*args, **kwargs)
            try:
                undisturbed = NOTHING if processes is None else processes.undisturbed
                return self._run(run, args, kwargs, undisturbed)
            except BaseException as error:
                if processes is not None:
                    processes.tell(error)
                raise

        self._installed = install(self._module, call, self._name)

    @property
    def _forward(self) -> Callable[..., Any]:
        return self._own_forward or MethodType(type(self._module).forward, self._module)

    def _run(
        self, run: RunProgram, args: Sequence[Any], kwargs: dict[str, Any], undisturbed: Manager
    ) -> Any:
        kind, tensors = CallKind.of(args, kwargs)
        if _has_any_global_hook():
            self._warn_once(
                "hooks on all modules run with the layers of a traced forward only, and with none "
                f"of the modules that hold them: {self._name} has been traced. Register hooks on "
                "the modules that they are for."
            )
        program = self._programs.find(kind)
        if program is None:
            with undisturbed:
                program = self._programs.find(kind) or self._traced(kind, args, kwargs, tensors)
        return program(run, tensors)

    def _traced(
        self, kind: CallKind, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> LoweredProgram:
        check_constants(args, kwargs, tensors)
        graph = self._trace(kind)
        program = lower(graph, self._stage_modules).moved(self._first, self._n)
        assumed = AssumedAttributes(self._module, graph.whole, graph.reads)
        self._programs.add(kind, program, assumed, self._stage_modules.own.shared)
        return program

    def _trace(self, kind: CallKind) -> CallGraph:
        graph = rename(trace(self._module, self._forward, kind))
        lines = filter(None, (node.meta["checkpointed"] for node in graph.nodes))
        if line := next(lines, ""):
            self._warn_once(
                "a pipeline does not run the activation checkpointing of a traced forward: left "
                f"out at {line}. It recomputes whole stages itself, as its own "
                "activation_checkpointing says: switch that of the model off."
            )
        return graph

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)

    def _first_graphs(self) -> list[CallGraph]:
        """Trace training and, if possible, evaluation, with the required arguments only."""
        kind, modules = CallKind.required(self._forward), list(self._module.modules())
        with patched((vars(module), "training", True) for module in modules):
            graphs = [self._trace(kind)]
        evaluation = patched((vars(module), "training", False) for module in modules)
        with evaluation, suppress(UnsupportedForward):
            graphs.append(self._trace(kind))
        return graphs


class _Programs:
    """The programs of the kinds of call, each valid while its assumptions hold."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], tuple[LoweredProgram, AssumedAttributes]] = {}
        self._modules: dict[nn.Module, None] = {}  # whose training flags make a difference
        self._traces = 0

    def find(self, kind: CallKind) -> LoweredProgram | None:
        program, assumed = self._programs.get(self._key(kind), (None, None))
        return program if assumed is not None and assumed.holds() else None

    def add(
        self,
        kind: CallKind,
        program: LoweredProgram,
        assumed: AssumedAttributes,
        shared: Iterable[nn.Module],
    ) -> None:
        self._traces += 1
        if self._traces == _MANY:
            warnings.warn(
                f"{type(assumed.modules[0]).__name__} has been traced {_MANY} times, once for each "
                "kind of call: an argument that is no tensor, or an attribute that forward reads, "
                "is another in every call. Pass a number that changes as a tensor.",
                stacklevel=2,
            )
        modules = self._modules | dict.fromkeys([*assumed.modules, *shared])
        if len(modules) > len(self._modules) or len(self._programs) >= _KINDS:
            self._programs.clear()
        self._modules = modules
        self._programs[self._key(kind)] = program, assumed

    def _key(self, kind: CallKind) -> tuple[Any, ...]:
        return kind, tuple(module.training for module in self._modules), Modes.now()


def _modules_of(graph: CallGraph, unit: Unit) -> nn.Module:
    named = dict(graph.root.named_parameters())
    paths = (str(source.target) for node in unit.nodes for source in node.all_input_nodes)
    read = nn.ParameterList(named[path] for path in paths if path in named)
    return nn.ModuleList([*map(graph.layer, unit.calls), read])
