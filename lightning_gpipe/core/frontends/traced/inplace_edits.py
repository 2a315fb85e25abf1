"""In-place edits in a traced forward, and the check that other stages would see them.

A value that travels is another tensor on the stage that gets it. So the steps after an edit are
changed to use the result of the edit and not the value from before. In the plain module an edit
also changes other tensors with the same memory. That holds in a pipeline only if all are on one
stage, and is refused otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.symbolic import IN_PLACE, set_item
from lightning_gpipe.core.frontends.traced.traced_values import ValueKind, function_name, kind_of
from lightning_gpipe.core.frontends.traced.unsupported import UnsupportedForward

_OPERATORS = frozenset({set_item, *(getattr(operator, name) for name in IN_PLACE.split())})
# Functions and methods that may return a tensor with the memory of their first argument.
_RETURN_VIEWS = (
    "view view_as reshape reshape_as transpose permute swapaxes swapdims movedim moveaxis t "
    "flatten unflatten squeeze unsqueeze expand expand_as narrow select chunk split unbind "
    "tensor_split diagonal unfold as_strided detach contiguous to type type_as float double "
    "half bfloat16 cpu cuda broadcast_to broadcast_tensors real imag view_as_real "
    "view_as_complex dropout positive alias atleast_1d atleast_2d atleast_3d ravel T mT data "
    "getitem"
)
_VIEWS = frozenset(_RETURN_VIEWS.split())


def rename(graph: CallGraph) -> CallGraph:
    """Make the steps after an edit use its result."""
    renamed: dict[fx.Node, fx.Node] = {}

    def latest(node: fx.Node) -> fx.Node:
        while node in renamed:
            node = renamed[node]
        return node

    for node in graph.nodes:
        node.args = fx.node.map_arg(node.args, latest)
        node.kwargs = fx.node.map_arg(node.kwargs, latest)
        target = edited(graph, node)
        if target is not None:
            renamed[target] = node
    outputs = [latest(node) for node in graph.outputs]
    return CallGraph(**{**vars(graph), "outputs": outputs})


def edited(graph: CallGraph, node: fx.Node) -> fx.Node | None:
    """Return the value that a step edits in place."""
    target = node.args[0] if node.args else None
    if not isinstance(target, fx.Node) or kind_of(target) in (ValueKind.NUMBER, ValueKind.SIZES):
        return None
    return target if _edits(graph, node) else None


def check_edits(graph: CallGraph, stages: Mapping[fx.Node, int]) -> None:
    """Raise UnsupportedForward if an edit would not reach a tensor with the same memory."""
    order = {node: k for k, node in enumerate([*graph.inputs, *graph.nodes])}
    for edit in graph.nodes:
        target = edited(graph, edit)
        if target is None:
            continue
        here = stages[edit]
        aliases = _aliases(graph, target, order[edit], order)
        for alias in aliases:
            if alias.op == "get_attr":
                raise UnsupportedForward(_of_the_module(edit, str(alias.target)))
        near = _aliases(graph, target, order[edit], order, stages, here)
        for alias in aliases - {target}:
            for user in alias.users:
                if order[user] <= order[edit] or user not in stages:
                    continue
                local = alias in near and stages[user] >= here
                if not local or (stages.get(alias) != here and stages[user] != here):
                    raise UnsupportedForward(_message(edit, user, here, stages[user]))


def _edits(graph: CallGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = graph.layer(node)
        return bool(getattr(layer, "inplace", False)) and not any(True for _ in layer.children())
    name = function_name(node)
    if name.endswith("_") and not name.endswith("__") and node.target not in _TRAILING:
        return True
    inplace = node.op == "call_function" and node.kwargs.get("inplace")
    return bool(inplace) or node.target in _OPERATORS


_TRAILING = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})


def _aliases(
    graph: CallGraph,
    start: fx.Node,
    before: int,
    order: Mapping[fx.Node, int],
    stages: Mapping[fx.Node, int] | None = None,
    stage: int = 0,
) -> set[fx.Node]:
    """Return the values before step ``before`` that may share memory with ``start``.

    With ``stages``, the stage of each step, only by views that ``stage`` makes.
    """
    aliases, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node in aliases or node not in order or order[node] >= before:
            continue
        aliases.add(node)
        for one, other, view in _links(graph, node):
            if stages is None or stages.get(view) == stage:
                waiting.append(other if one is node else one)
    return aliases


def _links(graph: CallGraph, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Yield pairs of values that may share memory, one of them ``node``, and the step for it."""
    if _views(graph, node) and node.args and isinstance(node.args[0], fx.Node):
        yield node, node.args[0], node
    for user in node.users:
        if user.args and user.args[0] is node and _views(graph, user):
            yield node, user, user


def _views(graph: CallGraph, node: fx.Node) -> bool:
    if kind_of(node) in (ValueKind.NUMBER, ValueKind.SIZES):
        return False
    if _edits(graph, node):
        return True
    if node.op == "call_module":
        return next(graph.layer(node).parameters(), None) is None
    name = node.args[1] if node.target is getattr else function_name(node)
    return name in _VIEWS


def _of_the_module(edit: fx.Node, path: str) -> str:
    return (
        "a forward must not change buffers or parameters between layers, which a pipeline would do "
        f"once for each micro-batch, and again when it is recomputed: {edit.meta['line']} changes "
        f"{path}. Do it outside of the model, or in a module of its own, which runs as one layer."
    )


def _message(edit: fx.Node, user: fx.Node, here: int, there: int) -> str:
    return (
        f"a value that is edited in place must not be used through another tensor on another "
        f"stage: {edit.meta['line']} edits one on stage {here}, and {user.meta['line']} uses a "
        f"tensor with the same memory on stage {there}. Write it without the edit, as x = x + y, "
        "or choose a balance that keeps both on one stage."
    )
