"""The graph of one kind of call; an inner module that cannot be traced stays one step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.proxy import TraceError

from lightning_gpipe.core.frontends.lines import line_of
from lightning_gpipe.core.frontends.traced.call_kinds import CallKind
from lightning_gpipe.core.frontends.traced.traced_attributes import ModuleSnapshot
from lightning_gpipe.core.frontends.traced.tracer import Tracer
from lightning_gpipe.core.frontends.traced.watching import Modes, Reads

_READS = frozenset({getattr, operator.getitem})  # without effect


class UnsupportedForward(TypeError):
    """Raised with what must hold, the user's line, and what to do."""


@dataclass(frozen=True, eq=False)
class CallGraph:
    """The steps of one kind of call of ``root``, in order, without the placeholders."""

    root: nn.Module
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    returned: Any  # with the nodes of ``outputs`` in it
    modes: Modes
    whole: dict[nn.Module, str]  # why each module that is one layer could not be traced through
    reads: Reads  # the constants that the forward read of modules and parameters

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "call_module"]

    def layer(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))


def trace(root: nn.Module, forward: Callable[..., Any], kind: CallKind) -> CallGraph:
    """Trace a call of ``root`` and leave it as it was; raise UnsupportedForward if that fails."""
    whole: dict[nn.Module, str] = {}
    while True:
        before = ModuleSnapshot(root)
        tracer = Tracer(root, forward, kind, whole)
        graph: fx.Graph | None = None
        error: Exception | None = None
        try:
            graph = tracer.record()
        except Exception as raised:
            error = raised
        finally:
            changed = before.restore()
        if graph is not None and not changed:
            return _graph(root, graph, tracer, whole)
        if error is not None:
            line = line_of(error)
            why = f"{error} ({type(error).__name__}){f', at {line}' if line else ''}"
            failed = tracer.failed
        else:  # the last module, in the order of the tree, whose attributes its forward changed
            failed = [module for module in root.modules() if module in changed][-1]
            names = [f"{type(m).__name__}.{name}" for m, own in changed.items() for name in own]
            why = f"it changes {', '.join(names)}, which would happen only once, when it is traced"
        if failed is None or failed is root or failed in whole:
            raise UnsupportedForward(
                f"the forward of {type(root).__name__} must be traceable by torch.fx to be cut "
                f"into stages, the same calls whatever the values are: {why}. "
                f"{_advice(kind, error)} into a module of its own, which runs as one layer, or "
                "pipeline a part of the model with module=..."
            ) from error
        alike = [module for module in root.modules() if type(module) is type(failed)]
        of_torch = type(failed).__module__.startswith("torch.nn")
        whole |= dict.fromkeys([failed] if of_torch else alike, why)


def _advice(kind: CallKind, error: Exception | None) -> str:
    if not kind.omitted or isinstance(error, TraceError | None):  # whatever the arguments are
        return "Move that line"
    return (
        f"The first trace, at setup, omits {', '.join(kind.omitted)}: if the line needs one of "
        "them, remove the default of an argument that every call has, and write a name for one "
        "that comes in *args or **kwargs. Otherwise move the line"
    )


def _graph(
    root: nn.Module, graph: fx.Graph, tracer: Tracer, whole: dict[nn.Module, str]
) -> CallGraph:
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type, unused-ignore]  # of Tracer.record
    graph.erase_node(output)
    for node in reversed(graph.nodes):
        unused = node.op == "get_attr" or (node.op == "call_function" and node.target in _READS)
        if unused and not node.users and node not in outputs:
            graph.erase_node(node)
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    modes, reads = Modes.now(), tracer.attributes
    return CallGraph(root, nodes, inputs, outputs, tracer.returned, modes, whole, reads)
