"""A trial of the steps of a stage on other rows, which refuses those that compute across the rows.

Rules do not tell of all steps, since a graph has no shapes: ``x / x.shape[-3]``, differences of all
pairs of rows, ``x.repeat(2, 1)``. So when a stage first runs a micro-batch, each step that is no
layer runs again on its rows in another order, one of them twice, with the numbers of rows that it
then has. It must return these rows of its result, along one dim, or the same result. A single row
runs between halves of it, since functions of equal rows can be those of one, as the mean is.
Nothing is told of a value from another stage unless it has one entry for each row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.faithful import AboutToDraw, WithoutDraws
from lightning_gpipe.core.frontends.cuts import Cut, few_of, same
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.inplace_edits import edited
from lightning_gpipe.core.frontends.traced.row_dims import CHECKS, RowDims, over_all_rows
from lightning_gpipe.core.frontends.traced.symbolic import filled, first_input, function_name
from lightning_gpipe.core.frontends.traced.traced_call import across_rows

_WHOLE: Cut = 0, 0, False


class _Unknown:
    """Stands for a leaf of which it is not known where its rows are."""


class _Other(NamedTuple):
    """A leaf with another value beside the chosen rows: made of their number, or of all of them."""

    value: Any


class RowTrial:
    """The trial of the steps of one stage: once with several rows, and before it once with one."""

    def __init__(self, graph: CallGraph, dims: RowDims) -> None:
        self.is_over = False
        self._had_one_row = False  # less can be seen of one, so it waits for several
        self._graph, self._dims = graph, dims
        self._nodes: list[fx.Node] = []
        self._leaves: dict[fx.Node, Sequence[Any]] = {}  # a Cut, an _Other or _Unknown for each
        self._rows = 0  # of the micro-batch; 0 if it is not known

    def of(self, node: fx.Node, run: Callable[..., Any]) -> TriedStep | None:
        """Return the step of a node as a part of the trial; None for one that is not tried."""
        if node.op == "call_module" or function_name(node) in CHECKS:
            return None
        self._nodes.append(node)
        return TriedStep(self, node, run)

    def run(self, node: fx.Node, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step on its arguments, and on the chosen rows of these."""
        if self.is_over:
            return run(*args, **kwargs)
        if node is self._nodes[0]:
            self._rows, self._leaves = 0, {}
        if not self._rows:
            pairs = _pairs((node.args, node.kwargs), (args, kwargs))
            self._rows = next(filter(None, starmap(self._rows_of, pairs)), 0)
        if not self._rows or (self._rows == 1 and self._had_one_row):
            result = run(*args, **kwargs)
        else:
            values = dict(_pairs((node.args, node.kwargs), (args, kwargs)))
            chosen = self._chosen(node, values)
            result = run(*args, **kwargs)
            self._leaves[node] = self._tried(node, run, values, chosen, result)
        if node is self._nodes[-1]:
            self._had_one_row = self._rows == 1
            self.is_over = not self._had_one_row
            self._leaves = {}
        return result

    @property
    def _order(self) -> list[int]:
        """The chosen rows, in other places; more than before, so that a shape tells their dim."""
        return [*range(1, self._rows), 0, 0] if self._rows > 1 else [0, 0, 0, 0]

    def _chosen(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """The values with the chosen rows, and copies of what the step edits."""
        target = edited(self._graph, node)
        chosen = {}
        for x, value in values.items():
            flat = tree_flatten(value)
            self._leaves.setdefault(
                x, [self._arriving(x, value, k, leaf) for k, leaf in enumerate(flat.leaves)]
            )
            pairs = zip(flat.leaves, self._leaves[x], strict=True)
            leaves = [self._with_chosen_rows(leaf, place, x is target) for leaf, place in pairs]
            tree = tree_unflatten(FlatTree(leaves, flat.spec))
            sizes = isinstance(value, torch.Size) and _Unknown not in leaves
            chosen[x] = torch.Size(tree) if sizes else tree
        return chosen

    def _with_chosen_rows(self, leaf: Any, place: Any, edited: bool) -> Any:
        if place is _Unknown:
            return _Unknown
        if isinstance(place, _Other):
            return place.value
        if _has_rows(place):
            if self._rows == 1 and (leaf.is_floating_point() or leaf.is_complex()):
                return _between_halves(leaf.detach(), place)
            return few_of(leaf, place, self._rows, self._order)
        return leaf.clone() if edited and isinstance(leaf, Tensor) else leaf

    def _rows_of(self, node: fx.Node, value: Any) -> int:
        dim = self._dims.get(node)
        if dim is None or node in self._dims.folded or not isinstance(value, Tensor):
            return 0
        return value.size(dim) if value.dim() > dim else 0

    def _arriving(self, node: fx.Node, value: Any, k: int, leaf: Any) -> Any:
        """The place of the rows in a leaf of a value of another stage, or of a layer."""
        if not isinstance(leaf, Tensor):
            if node in self._dims.counts and leaf == self._rows:
                return _Other(len(self._order))
            numbers = [x for x in (leaf if isinstance(leaf, tuple) else (leaf,)) if type(x) is int]
            return _Unknown if any(x and x % self._rows == 0 for x in numbers) else _WHOLE
        if node not in self._dims:
            return _WHOLE
        if not _is_plain(leaf):
            return _Unknown
        place = None if node in self._dims.folded else (1, self._dims[node], False)
        if node.op == "call_module":
            if k or isinstance(value, dict):
                return _Unknown
            given = (x for source in node.all_input_nodes for x in self._leaves.get(source, ()))
            place = next(filter(_has_rows, given), place)
        if place is None:
            return _Unknown
        entries, dim, inner = place
        if dim is None or leaf.dim() <= dim or leaf.size(dim) != entries * self._rows:
            return _Unknown
        return entries, dim % leaf.dim(), inner

    def _tried(
        self,
        node: fx.Node,
        run: Callable[..., Any],
        values: Mapping[fx.Node, Any],
        chosen: Mapping[fx.Node, Any],
        result: Any,
    ) -> Sequence[Any]:
        """Return the places of the rows in the leaves of a result, found by another run."""
        flat, line = tree_flatten(result), node.meta["line"]
        places = {x: self._leaves[x] for x in values}
        every = [place for each in places.values() for place in each]
        base = first_input(node)
        picks = node.target is operator.getitem and not isinstance(base and values[base], Tensor)
        if _Unknown in every and not picks:
            return [_Unknown] * len(flat.leaves)
        if all(place == _WHOLE for place in every):
            return [_WHOLE] * len(flat.leaves)
        reduced = [x for x, each in places.items() if any(map(_is_reduced, each))]
        if reduced and any(map(_has_rows, every)):
            raise over_all_rows(reduced[0], node)
        args, kwargs = filled((node.args, node.kwargs), chosen.__getitem__)
        try:
            with torch.no_grad(), WithoutDraws():
                part = tree_flatten(run(*args, **kwargs))
        except AboutToDraw:
            return [self._place_of_like(leaf, values) for leaf in flat.leaves]
        except Exception as error:
            raise across_rows(line, f"raises {type(error).__name__} with other rows") from error
        if reduced:
            return list(map(_Other, part.leaves))
        found = [self._place(*pair) for pair in zip(flat.leaves, part.leaves, strict=False)]
        if not any(map(_has_rows, every)):  # made of numbers of rows, maybe to index rows
            found = [_Other(y) if x is None else x for x, y in zip(found, part.leaves, strict=True)]
        if None in found or part.spec != flat.spec:
            raise across_rows(line, "gives the same rows other results beside others")
        if any(map(_is_moved, found)) and _is_returned(node, self._graph):
            raise across_rows(line, "returns rows that are not in dim 0, one after another")
        return found

    def _place_of_like(self, leaf: Any, values: Mapping[fx.Node, Any]) -> Any:
        """The place of the rows in an argument of the shape of a leaf."""
        for x, value in values.items():
            for one, place in zip(tree_flatten(value).leaves, self._leaves[x], strict=True):
                if isinstance(leaf, Tensor) and _has_rows(place) and one.shape == leaf.shape:
                    return place
        return _Unknown

    def _place(self, leaf: Any, part: Any) -> Any:
        """The place of the rows in a leaf, of which the chosen rows must be ``part``, or None."""
        if part is _Unknown:
            return _Unknown
        if not (isinstance(leaf, Tensor) and isinstance(part, Tensor)):
            return _WHOLE if same(leaf, part) else _Other(part)
        if not _is_plain(leaf):
            return _Unknown
        if leaf.shape == part.shape:
            if same(leaf, part, close=True):
                return _WHOLE
            return None if leaf.dim() else _Other(part)
        others = [k for k, (x, y) in enumerate(zip(leaf.shape, part.shape, strict=False)) if x != y]
        entries = leaf.size(others[0]) // self._rows if others else 0
        if len(others) != 1 or part.size(others[0]) != entries * len(self._order):
            return None
        count = len(self._order)
        known = range(count) if self._rows > 1 else [1]  # the halves have results of their own
        for inner in (False, True):
            cut = entries, others[0], inner
            expected = few_of(leaf, cut, self._rows, [self._order[k] for k in known])
            if same(expected, few_of(part, cut, count, known), close=True):
                return cut
        return None


class TriedStep(NamedTuple):
    """A step in the trial of its stage."""

    trial: RowTrial
    node: fx.Node
    run: Callable[..., Any]

    @property
    def is_over(self) -> bool:
        return self.trial.is_over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.trial.run(self.node, self.run, args, kwargs)


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and type(tensor) in (Tensor, nn.Parameter)


def _between_halves(row: Tensor, cut: Cut) -> Tensor:
    """A single row between others, which a step that can compute with it should allow.

    It is not in the middle, where it would stay if the rows were turned around.
    """
    _, dim, inner = cut
    return torch.stack([row / 2, row, row / 2, row / 2], dim + inner).flatten(dim, dim + 1)


def _has_rows(place: Any) -> bool:
    return place is not _Unknown and not isinstance(place, _Other) and place[0] > 0


def _is_reduced(place: Any) -> bool:
    return isinstance(place, _Other) and isinstance(place.value, Tensor) and not place.value.dim()


def _is_moved(place: Any) -> bool:
    return _has_rows(place) and (place[1] > 0 or (place[2] and place[0] > 1))


def _is_returned(node: fx.Node, graph: CallGraph) -> bool:
    """Return whether a value is an output, or layers alone make one of it."""
    layers = (user for user in node.users if user.op == "call_module")
    return node in graph.outputs or any(_is_returned(user, graph) for user in layers)


def _pairs(tree: Any, values: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the nodes in the arguments of a step, with their values."""
    if isinstance(tree, fx.Node):
        yield tree, values
    elif isinstance(tree, slice):
        for name in ("start", "stop", "step"):
            yield from _pairs(getattr(tree, name), getattr(values, name))
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from _pairs(tree[key], values[key])
    elif isinstance(tree, list | tuple):
        for child, value in zip(tree, values, strict=True):
            yield from _pairs(child, value)
