"""The front-end for any module: its forward is traced, cut, and run as a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_gpipe.core.frontends.install import Installed, check_free, install
from lightning_gpipe.core.frontends.interface import Frontend, RunProgram
from lightning_gpipe.core.frontends.traced.calls import CallKind, tensors_in
from lightning_gpipe.core.frontends.traced.edits import rename
from lightning_gpipe.core.frontends.traced.graph import Graph, trace
from lightning_gpipe.core.frontends.traced.holding import Held
from lightning_gpipe.core.frontends.traced.lines import Refused
from lightning_gpipe.core.frontends.traced.lowering import Lowered, lower
from lightning_gpipe.core.frontends.traced.modes import Modes
from lightning_gpipe.core.frontends.traced.ownership import Ownership
from lightning_gpipe.core.frontends.traced.units import units_of
from lightning_gpipe.core.plan import Partition, check_balance


class Traced(Frontend):
    """Traces a module's forward, once for each kind of call.

    Args:
        root: The module.
        name: The user's name for it, for error messages.

    Raises:
        Refused: If its forward cannot be traced.
    """

    def __init__(self, root: nn.Module, name: str = "module") -> None:
        check_free(root, name)
        self._root = root
        self._name = name
        self._forward = root.forward
        self._installed: Installed | None = None
        self._lowered: dict[tuple[Any, ...], Lowered] = {}
        self._graphs = self._first_graphs()
        self._units = units_of(self._graphs[0])
        self._own: Ownership | None = None
        self._held: Held | None = None

    @property
    @override
    def units(self) -> Sequence[str]:
        return [unit.name for unit in self._units]

    @override
    def costs(self) -> list[int]:
        return [sum(p.numel() for p in new) for new in self._new_parameters()]

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        check_balance(balance, len(self._units), self._name)
        self._own = Ownership.cut(self._graphs[0], self._units, balance)
        for graph in self._graphs[1:]:
            self._own.extend(graph)
        self._held = Held(self._graphs, self._own)
        self._lowered.clear()
        lower(self._graphs[0], self._own, self._held)  # what cannot be cut there is refused here
        return self._held.partitions

    @override
    def install(self, run: RunProgram) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._program(args, kwargs)(run, tensors_in(args, kwargs))

        self._installed = install(self._root, call, self._name)

    @override
    def remove(self) -> None:
        if self._installed is not None:
            self._installed.remove()

    @override
    @contextmanager
    def plain(self) -> Iterator[None]:
        installed = self._root.__dict__.pop("forward", None)
        try:
            yield
        finally:
            if installed is not None:
                self._root.forward = installed

    def _program(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Lowered:
        """The program of a call."""
        assert self._own is not None
        assert self._held is not None
        key = CallKind(args, kwargs), self._flags(), Modes.now()
        if key not in self._lowered:
            graph = self._trace(key[0])
            self._lowered[key] = lower(graph, self._own, self._held)
        return self._lowered[key]

    def _trace(self, kind: CallKind) -> Graph:
        return rename(trace(self._root, self._forward, kind))

    def _flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._root.modules())

    def _first_graphs(self) -> list[Graph]:
        """The graphs of training and, if it can be traced, of evaluation, with plain arguments."""
        kind = CallKind.plain(self._forward)
        with training_as(self._root, True):
            graphs = [self._trace(kind)]
        with training_as(self._root, False), suppress(Refused):
            graphs.append(self._trace(kind))
        return graphs

    def _new_parameters(self) -> Iterator[list[nn.Parameter]]:
        """For each unit the parameters that no earlier one has."""
        seen: set[nn.Parameter] = set()
        for unit in self._units:
            layers = [self._graphs[0].layer(call) for call in unit.calls]
            found = [p for layer in layers for p in layer.parameters()]
            paths = [
                str(each.target)
                for node in unit.nodes
                for each in node.all_input_nodes
                if each.op == "get_attr"
            ]
            named = dict(self._root.named_parameters())
            found += [named[path] for path in paths if path in named]
            yield [p for p in dict.fromkeys(found) if p not in seen]
            seen.update(found)


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
