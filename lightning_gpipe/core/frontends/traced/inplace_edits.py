"""In-place edits in a traced forward, and the check that other stages would see them.

The steps after an edit use its result, as a value that travels is another tensor. Edits that change
other tensors with the same memory on another stage are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from lightning_gpipe.core.data import map_instances
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.symbolic import (
    IN_PLACE,
    ValueKind,
    first_input,
    function_name,
    kind_of,
    set_item,
)

_OPERATORS = frozenset({set_item, *(getattr(operator, name) for name in IN_PLACE.split())})
_TRAILING = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})  # no edits
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
    returned = map_instances(fx.Node, latest, graph.returned)
    return replace(graph, outputs=list(map(latest, graph.outputs)), returned=returned)


def edited(graph: CallGraph, node: fx.Node) -> fx.Node | None:
    """Return the value that a step edits in place."""
    target = first_input(node)
    return target if _is_memory(target) and _edits(graph, node) else None


def check_edits(graph: CallGraph, stages: Mapping[fx.Node, int]) -> None:
    """Raise UnsupportedForward if an edit would not reach a tensor with the same memory."""
    order = {node: k for k, node in enumerate([*graph.inputs, *graph.nodes])}
    for edit in graph.nodes:
        target = edited(graph, edit)
        if target is None:
            continue
        here = stages[edit]
        aliases = _aliases(graph, edit, target, order)
        for alias in aliases:
            if alias.op == "get_attr":
                raise UnsupportedForward(
                    "a forward must not change buffers or parameters between layers, which a "
                    "pipeline would do once for each micro-batch, and again when it is recomputed: "
                    f"{edit.meta['line']} changes {alias.target}. Do it outside of the model, or "
                    "in a module of its own, which runs as one layer."
                )
        near = _aliases(graph, edit, target, order, stages)
        for alias in aliases - {target}:
            for user in alias.users:
                if order[user] <= order[edit] or user not in stages:
                    continue
                local = alias in near and stages[user] >= here
                if not local or (stages.get(alias) != here and stages[user] != here):
                    raise UnsupportedForward(
                        "a value that is edited in place must not be used through a tensor of "
                        f"another stage: {edit.meta['line']} edits, on stage {here}, a tensor "
                        f"{_origin(target, stages)}, and {user.meta['line']} uses, on stage "
                        f"{stages[user]}, another one {_origin(alias, stages)} with the same "
                        "memory. Write it without the edit, as x = x + y, or choose a balance that "
                        "keeps all of these on one stage."
                    )


def _origin(node: fx.Node, stages: Mapping[fx.Node, int]) -> str:
    return f"from stage {stages[node]}" if node in stages else "from outside"


def _edits(graph: CallGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = graph.layer(node)
        return bool(getattr(layer, "inplace", False)) and not any(True for _ in layer.children())
    name = function_name(node)
    if name.endswith("_") and not name.endswith("__") and node.target not in _TRAILING:
        return True
    inplace = node.op == "call_function" and node.kwargs.get("inplace")
    return bool(inplace) or node.target in _OPERATORS


def _aliases(
    graph: CallGraph,
    edit: fx.Node,
    target: fx.Node,
    order: Mapping[fx.Node, int],
    stages: Mapping[fx.Node, int] | None = None,
) -> set[fx.Node]:
    """Return the values before an edit of ``target`` that may share memory with it.

    With ``stages``, the stage of each step, only by views that the edit's stage makes.
    """
    aliases, waiting = set(), [target]
    while waiting:
        node = waiting.pop()
        if node in aliases or node not in order or order[node] >= order[edit]:
            continue
        aliases.add(node)
        for other, view in _links(graph, node):
            if stages is None or stages.get(view) == stages[edit]:
                waiting.append(other)
    return aliases


def _links(graph: CallGraph, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the values that may share memory with ``node`` by one step, and the step."""
    source = first_input(node)
    if source is not None and _views(graph, node):
        yield source, node
    for user in node.users:
        if first_input(user) is node and _views(graph, user):
            yield user, user


def _views(graph: CallGraph, node: fx.Node) -> bool:
    if not _is_memory(node):
        return False
    if _edits(graph, node):
        return True
    if node.op == "call_module":
        return next(graph.layer(node).parameters(), None) is None
    name = node.args[1] if node.target is getattr else function_name(node)
    return name in _VIEWS


def _is_memory(node: fx.Node | None) -> bool:
    return node is not None and kind_of(node) not in (ValueKind.NUMBER, ValueKind.SIZES)
