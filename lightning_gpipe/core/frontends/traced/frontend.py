"""The front-end for any module: its forward is traced, cut, and run as a program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from typing_extensions import override

from lightning_gpipe.core.faithful import is_traced
from lightning_gpipe.core.frontends.install import (
    Installed,
    check_free,
    check_recordable,
    install,
)
from lightning_gpipe.core.frontends.interface import Frontend, Processes, RunProgram
from lightning_gpipe.core.frontends.traced.assumed import Assumed
from lightning_gpipe.core.frontends.traced.calls import CallKind, check_constants
from lightning_gpipe.core.frontends.traced.edits import rename
from lightning_gpipe.core.frontends.traced.graph import Graph, trace
from lightning_gpipe.core.frontends.traced.holding import Held
from lightning_gpipe.core.frontends.traced.lowering import Lowered, lower
from lightning_gpipe.core.frontends.traced.modes import Modes
from lightning_gpipe.core.frontends.traced.ownership import Ownership
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.units import Unit, units_of
from lightning_gpipe.core.plan import Partition, check_balance

_KINDS = 64  # so many programs are kept
_MANY = 16  # after so many, one more is a surprise


class Traced(Frontend):
    """Traces a module's forward, once for each kind of call.

    Args:
        model: The user's model.
        path: Where the module is in it; empty if it is the model.
        module: The module.

    Raises:
        Refused: If its forward cannot be traced.
    """

    def __init__(self, model: nn.Module, path: str, module: nn.Module) -> None:
        self._name = f"{type(model).__name__}.{path}" if path else type(model).__name__
        check_free(module, self._name)
        self._prefix = f"{path}." if path else ""
        self._module = module
        self._said: set[str] = set()
        self._own_forward = module.__dict__.get("forward")
        self._graphs = self._first_graphs()
        units = units_of(self._graphs[0])
        if not units:
            raise Refused(
                f"{self._name} must call modules in its forward, between which it can be cut: got "
                "none. Pipeline the module that holds it."
            )
        self._units = [f"{self._prefix}{unit.name}" for unit in units]
        self._costs = list(_costs(self._graphs[0], units))
        self._own = Ownership(0)
        self._held: Held | None = None
        self._programs = _Programs()
        self._installed: Installed | None = None

    @property
    @override
    def owner(self) -> nn.Module:
        return self._module

    @property
    @override
    def units(self) -> Sequence[str]:
        return self._units

    @override
    def costs(self) -> list[int]:
        return self._costs

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        try:
            check_balance(balance, len(self._units), self._name)
        except ValueError as error:
            for module, why in self._graphs[0].whole.items():
                error.add_note(f"{type(module).__name__} is one layer: {why}")
            raise
        self._programs = _Programs()  # those of another cut are for other stages
        self._own = Ownership.cut(self._graphs[0], units_of(self._graphs[0]), balance)
        for graph in self._graphs[1:]:
            self._own.extend(graph)
        self._held = Held(self._graphs, self._own, self._prefix)
        for graph in self._graphs:
            lower(graph, self._own, self._held)  # what cannot be cut there is refused here
        return self._held.partitions

    @override
    def install(self, run: RunProgram, processes: Processes | None = None) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced((args, kwargs), self._module.parameters()):
                check_recordable(self._module)
                return self._forward(*args, **kwargs)
            try:
                return self._run(run, args, kwargs)
            except BaseException as error:
                if processes is not None:
                    processes.tell(error)
                raise

        self._installed = install(self._module, call, self._name)

    @override
    def remove(self) -> None:
        if self._installed is not None:
            self._installed.remove()

    @override
    @contextmanager
    def plain(self) -> Iterator[None]:
        forward = self._module.__dict__.pop("forward", None)
        if self._own_forward is not None:
            self._module.forward = self._own_forward
        try:
            yield
        finally:
            self._module.__dict__.pop("forward", None)
            if forward is not None:
                self._module.forward = forward

    def __getstate__(self) -> dict[str, Any]:
        # A copy traces by itself: graphs are of the modules that were traced.
        fresh = {"_graphs": [], "_programs": _Programs(), "_installed": None}
        return self.__dict__ | fresh

    @property
    def _forward(self) -> Callable[..., Any]:
        """The forward without a pipeline."""
        if self._own_forward is not None:
            return self._own_forward
        return MethodType(type(self._module).forward, self._module)

    def _run(self, run: RunProgram, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the forward returns: run as a program."""
        assert self._held is not None, "it was cut"
        kind, tensors = CallKind.of(args, kwargs)
        found = self._programs.find(kind)
        if _has_any_global_hook():
            self._say_once(
                "hooks on all modules run with the layers of a traced forward only, and with none "
                f"of the modules that hold them: {self._name} has been traced. Register hooks on "
                "the modules that they are for."
            )
        if found is None:
            check_constants(args, kwargs, tensors)
            graph = self._trace(kind)
            found = lower(graph, self._own, self._held)
            self._programs.add(kind, found, Assumed(self._module, graph.whole), self._own)
        return found(run, tensors)

    def _trace(self, kind: CallKind) -> Graph:
        graph = rename(trace(self._module, self._forward, kind))
        if graph.checkpointed:
            self._say_once(
                "a pipeline does not run the activation checkpointing of a traced forward: left "
                f"out at {graph.checkpointed[0]}. It recomputes whole stages itself, as its own "
                "activation_checkpointing says: switch that of the model off."
            )
        return graph

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=3)

    def _first_graphs(self) -> list[Graph]:
        """The graphs of training and, if it can be traced, of evaluation, with plain arguments."""
        kind = CallKind.plain(self._forward)
        with training_as(self._module, True):
            graphs = [self._trace(kind)]
        with training_as(self._module, False), suppress(Refused):
            graphs.append(self._trace(kind))
        return graphs


class _Programs:
    """The programs of the kinds of call, each while what it was traced with holds."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[Lowered, Assumed]] = {}
        self._modules: dict[nn.Module, None] = {}  # whose training flags make a difference
        self._made = 0

    def find(self, kind: CallKind) -> Lowered | None:
        """The program of a kind of call, in the modes of now."""
        program, assumed = self._found.get(self._key(kind), (None, None))
        return program if assumed is not None and assumed.holds() else None

    def add(self, kind: CallKind, program: Lowered, assumed: Assumed, own: Ownership) -> None:
        """Keep a program."""
        self._made += 1
        if self._made == _MANY:
            warnings.warn(
                f"{type(assumed.modules[0]).__name__} has been traced {_MANY} times, once for each "
                "kind of call: an argument that is no tensor, or an attribute that forward reads, "
                "is another in every call. Pass a number that changes as a tensor.",
                stacklevel=2,
            )
        modules = self._modules | dict.fromkeys([*assumed.modules, *own.shared])
        if len(modules) > len(self._modules) or len(self._found) >= _KINDS:
            self._found.clear()
        self._modules = modules
        self._found[self._key(kind)] = program, assumed

    def _key(self, kind: CallKind) -> tuple[Any, ...]:
        return kind, tuple(module.training for module in self._modules), Modes.now()


def _costs(graph: Graph, units: Sequence[Unit]) -> Iterator[int]:
    """The number of elements of the parameters of each unit that no earlier one has."""
    seen: set[nn.Parameter] = set()
    named = dict(graph.root.named_parameters())
    for unit in units:
        found = [p for call in unit.calls for p in graph.layer(call).parameters()]
        read = {str(each.target) for node in unit.nodes for each in node.all_input_nodes}
        found += [named[path] for path in read if path in named]
        new = [p for p in dict.fromkeys(found) if p not in seen]
        yield sum(p.numel() for p in new)
        seen.update(new)


@contextmanager
def training_as(root: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flags of all modules, and restore them."""
    before = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, flag in before:
            module.training = flag
