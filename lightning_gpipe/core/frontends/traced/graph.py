"""The graph of one kind of call: traced through as far as can be, and what it returns.

A module whose own forward cannot be traced stays one step, with all modules in it. Only the
outermost forward has no such way out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lightning_gpipe.core.data import map_instances
from lightning_gpipe.core.frontends.lines import line_of
from lightning_gpipe.core.frontends.traced.calls import CallKind
from lightning_gpipe.core.frontends.traced.modes import Modes
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.snapshot import Snapshot
from lightning_gpipe.core.frontends.traced.symbolic import Symbolic
from lightning_gpipe.core.frontends.traced.tracer import Tracer

_READS = frozenset({getattr, operator.getitem})  # without effect


@dataclass(frozen=True)
class Output:
    """In the place of a value in what a forward returns: the index of the value."""

    index: int


@dataclass(frozen=True, eq=False)
class Graph:
    """What one kind of call runs.

    Attributes:
        root: The module.
        nodes: The steps, in order; placeholders first.
        inputs: The placeholders.
        outputs: The nodes of the values that the forward returns.
        returned: What it returns, with :class:`Output` for each value.
        modes: The modes in which it was traced.
        whole: For each module that could not be traced through, why.
    """

    root: nn.Module
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    returned: Any
    modes: Modes
    whole: dict[nn.Module, str]

    @property
    def calls(self) -> list[fx.Node]:
        """The calls of layers, in order."""
        return [node for node in self.nodes if node.op == "call_module"]

    @property
    def checkpointed(self) -> list[str]:
        """The user's lines that call PyTorch's activation checkpointing."""
        lines = (node.meta["checkpointed"] for node in self.nodes)
        return list(dict.fromkeys(line for line in lines if line))

    def layer(self, node: fx.Node) -> nn.Module:
        """The layer that a node calls."""
        return self.root.get_submodule(str(node.target))


def trace(
    root: nn.Module,
    forward: Callable[..., Any],
    kind: CallKind,
    layers: Collection[nn.Module] = (),
) -> Graph:
    """Trace a call of ``forward``, and leave ``root`` as it was.

    Args:
        root: The module.
        forward: Its forward.
        kind: The kind of call.
        layers: Modules to keep whole, besides those that :func:`is_layer` says.

    Raises:
        Refused: If the forward of ``root`` itself cannot be traced.
    """
    whole: dict[nn.Module, str] = {}
    while True:
        tracer = Tracer(root, {*layers, *whole})
        before = Snapshot(root)
        returned: list[Any] = []

        def run(*values: Any, returned: list[Any] = returned) -> list[Any]:
            outputs: list[Any] = []
            returned.append(_with_places(kind.call(forward, values), outputs))
            return outputs

        graph: fx.Graph | None = None
        error: Exception | None = None
        try:
            graph = tracer.record(root, run, kind.given)
        except Exception as raised:
            error = raised
        finally:
            changed = before.restore()
        if graph is not None and not changed:
            return _graph(root, graph, returned[0], whole)
        failed = tracer.failed if error is not None else _innermost(root, changed)
        why = _why(error) if error is not None else _assigns(changed)
        if failed is None or failed is root or failed in whole:
            raise Refused(_refusal(root, why)) from error
        alike = [each for each in root.modules() if type(each) is type(failed)]
        own = type(failed).__module__.startswith("torch.nn")
        whole |= dict.fromkeys([failed] if own else alike, why)


def _graph(root: nn.Module, graph: fx.Graph, returned: Any, whole: dict[nn.Module, str]) -> Graph:
    output = next(node for node in graph.nodes if node.op == "output")
    outputs = list(output.args[0])  # type: ignore[arg-type, unused-ignore]  # of Symbolic.record
    graph.erase_node(output)
    for node in reversed(graph.nodes):
        unused = node.op == "get_attr" or (node.op == "call_function" and node.target in _READS)
        if unused and not node.users and node not in outputs:
            graph.erase_node(node)
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return Graph(root, nodes, inputs, outputs, returned, Modes.now(), whole)


def _with_places(returned: Any, outputs: list[Any]) -> Any:
    """What was returned, with places for its values, which are added to ``outputs``."""

    def place(value: Symbolic) -> Output:
        outputs.append(value)
        return Output(len(outputs) - 1)

    return map_instances(Symbolic, place, returned)


def _innermost(root: nn.Module, changed: dict[nn.Module, list[str]]) -> nn.Module | None:
    """The last module, in the order of the tree, whose attributes its forward changed."""
    return [each for each in root.modules() if each in changed][-1]


def _assigns(changed: dict[nn.Module, list[str]]) -> str:
    names = [f"{type(module).__name__}.{name}" for module, each in changed.items() for name in each]
    return f"it changes {', '.join(names)}, which would happen only once, when it is traced"


def _why(error: Exception) -> str:
    line = line_of(error)
    return f"{error} ({type(error).__name__}){f', at {line}' if line else ''}"


def _refusal(root: nn.Module, why: str) -> str:
    return (
        f"the forward of {type(root).__name__} must be traceable by torch.fx to be cut into "
        f"stages, the same calls whatever the values are: {why}. Move that line into a module of "
        "its own, which runs as one layer, or pipeline a part of the model with module=..."
    )
