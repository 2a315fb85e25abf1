"""A trial of the steps of a stage on other rows, which refuses those that compute across the rows.

Rules do not tell of all steps, since a graph has no shapes: ``x / x.shape[-3]``, differences of all
pairs of rows, ``x.repeat(2, 1)``. So when a stage first runs a micro-batch, each step that is no
layer runs again on its rows in other places, beside others that are far from them, with the numbers
of rows that it then has. It must return these rows of its result, along one dim, or the same one. A
layer runs once: it is taken to leave rows where they are, in its first output, and of PyTorch's
layers the others are known. Nothing is told of a value from another process unless it has one entry
for each row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gpipe.core.data import FlatTree, tree_flatten, tree_unflatten
from lightning_gpipe.core.faithful import AboutToDraw, WithoutDraws, add_note, mixed_by
from lightning_gpipe.core.frontends.cuts import OTHERS, Cut, beside_others, few_of, same
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.inplace_edits import edited
from lightning_gpipe.core.frontends.traced.row_dims import CHECKS, RowDims, over_all_rows
from lightning_gpipe.core.frontends.traced.symbolic import (
    filled,
    first_input,
    function_name,
    pairs_in,
)
from lightning_gpipe.core.frontends.traced.traced_call import across_rows

_WHOLE: Cut = 0, 0, False
# Functions and methods that return memory that nobody has written, which is not compared.
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
_CUT = (
    "raised on the rows of a micro-batch: inputs are cut along dim 0, unless they are marked by "
    "whole(), from lightning_gpipe. A step that needs all rows at once, as adj @ h for the "
    "nodes of one graph, cannot be cut: it needs chunks=1."
)


class _Unknown:
    """Stands for a leaf of which it is not known where its rows are."""


class _Other(NamedTuple):
    """A leaf with another value beside the chosen rows: made of their number, or of all of them."""

    value: Any


class RowTrial:
    """The trial of the steps of one stage: once with several rows, and before it once with one.

    ``found`` has the places of rows that the trials of earlier stages in this process have found.
    """

    def __init__(
        self, graph: CallGraph, dims: RowDims, found: dict[fx.Node, Sequence[Any]]
    ) -> None:
        self.is_over = False
        self._had_one_row = False  # less can be seen of one, so it waits for several
        self._graph, self._dims, self._found = graph, dims, found
        self._nodes: list[fx.Node] = []
        self._leaves: dict[fx.Node, Sequence[Any]] = {}  # a Cut, an _Other or _Unknown for each
        self._rows = 0  # of the micro-batch; 0 if it is not known

    def of(self, node: fx.Node, run: Callable[..., Any]) -> TriedStep | None:
        """Return the step of a node as a part of the trial; None for one that is not tried."""
        if function_name(node) in CHECKS:
            return None
        self._nodes.append(node)
        return TriedStep(self, node, run)

    def run(self, node: fx.Node, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step on its arguments, and on the chosen rows of these."""
        if self.is_over:
            return run(*args, **kwargs)
        if function_name(node) in _UNWRITTEN:
            run = partial(_zeroed, run)
        if node is self._nodes[0]:
            self._rows, self._leaves = 0, {}
        if not self._rows:
            pairs = pairs_in((node.args, node.kwargs), (args, kwargs))
            self._rows = next(filter(None, starmap(self._rows_of, pairs)), 0)
        if not self._rows or (self._rows == 1 and self._had_one_row):
            result = run(*args, **kwargs)
        else:
            values = dict(pairs_in((node.args, node.kwargs), (args, kwargs)))
            for x, value in values.items():
                if x not in self._leaves:
                    leaves = enumerate(tree_flatten(value).leaves)
                    self._leaves[x] = [self._arriving(x, value, k, leaf) for k, leaf in leaves]
            if node.op == "call_module":
                result = run(*args, **kwargs)
                self._leaves[node] = self._after_layer(node, run, args, kwargs, result)
            else:
                trials = [self._trial_of(node, values, far=far) for far in (True, False)]
                result = run(*args, **kwargs)
                self._leaves[node] = self._tried(node, run, values, trials, result)
            self._found[node] = self._leaves[node]
        if node is self._nodes[-1]:
            self._had_one_row = self._rows == 1
            self.is_over = not self._had_one_row
            self._leaves = {}
        return result

    def _trial_of(
        self, node: fx.Node, values: Mapping[fx.Node, Any], *, far: bool
    ) -> dict[fx.Node, Any]:
        """The values with rows beside others, far from them or equal; copies of what is edited."""
        target = edited(self._graph, node)
        trial = {}
        for x, value in values.items():
            flat = tree_flatten(value)
            pairs = zip(flat.leaves, self._leaves[x], strict=True)
            leaves = [self._other_leaf(leaf, place, far, x is target) for leaf, place in pairs]
            tree = tree_unflatten(FlatTree(leaves, flat.spec))
            sizes = isinstance(value, torch.Size) and _Unknown not in leaves
            trial[x] = torch.Size(tree) if sizes else tree
        return trial

    def _other_leaf(self, leaf: Any, place: Any, far: bool, edited: bool) -> Any:
        if place is _Unknown:
            return _Unknown
        if isinstance(place, _Other):
            return place.value
        if _has_rows(place):
            return beside_others(leaf, place, self._rows, far=far)
        return leaf.clone() if edited and isinstance(leaf, Tensor) else leaf

    def _rows_of(self, node: fx.Node, value: Any) -> int:
        """The number of rows in a value; 0 if it is not known."""
        if not isinstance(value, Tensor):
            return 0
        found = self._found_in(node, 0)
        if _has_rows(found):
            return value.size(found[1]) // found[0]
        dim = None if node in self._dims.folded else self._dims.get(node)
        return value.size(dim) if dim is not None and value.dim() > dim else 0

    def _arriving(self, node: fx.Node, value: Any, k: int, leaf: Any) -> Any:
        """The place of the rows in a leaf of a value of another stage, or of a layer."""
        if not isinstance(leaf, Tensor):
            if node in self._dims.counts and leaf == self._rows:
                return _Other(self._rows + OTHERS)
            numbers = [x for x in (leaf if isinstance(leaf, tuple) else (leaf,)) if type(x) is int]
            return _Unknown if any(x and x % self._rows == 0 for x in numbers) else _WHOLE
        if node not in self._dims:
            return _WHOLE
        found = self._found_in(node, k)
        if _has_rows(found):
            return self._in_dim(leaf, *found)
        later = node.op == "call_module" and (k or isinstance(value, dict))  # output of a layer
        if later or node in self._dims.folded:
            return _Unknown
        return self._in_dim(leaf, 1, self._dims[node])

    def _found_in(self, node: fx.Node, k: int) -> Any:
        places = self._found.get(node, ())
        return places[k] if k < len(places) else _Unknown

    def _in_dim(self, leaf: Any, entries: int, dim: int | None, inner: bool = False) -> Any:
        """The place of rows in a dim of a leaf, if it is as long as they are."""
        if not (isinstance(leaf, Tensor) and _is_plain(leaf)) or dim is None or dim >= leaf.dim():
            return _Unknown
        place = entries, dim % leaf.dim(), inner
        return place if leaf.size(dim) == entries * self._rows else _Unknown

    def _after_layer(
        self, node: fx.Node, layer: Any, args: Any, kwargs: Any, result: Any
    ) -> Sequence[Any]:
        """The places of the rows in the leaves of what a layer returns."""
        leaves = tree_flatten(result).leaves
        if node not in self._dims:
            return [_WHOLE] * len(leaves)
        given = (self._leaves[x][0] for x in node.all_input_nodes if self._leaves[x])
        place: Any = next((x for x in given if x is _Unknown or _has_rows(x)), _Unknown)
        if place is _Unknown:
            return [_Unknown] * len(leaves)
        entries, dim, inner = place
        mixed = mixed_by(layer, args, kwargs)
        if mixed is not None and dim == mixed.dim % len(mixed.shape):
            what = f"moves the rows into dim {dim}, which {type(layer).__name__} mixes"
            raise across_rows(node.meta["line"], what)
        dims: dict[int, int] = {} if isinstance(result, dict) else {0: dim}
        if isinstance(layer, nn.RNNBase):
            dims |= {k: leaf.dim() - 2 for k, leaf in enumerate(leaves) if k}  # of states
        elif isinstance(layer, nn.MultiheadAttention):
            dims[1] = 0  # of weights
        return [self._in_dim(leaf, entries, dims.get(k), inner) for k, leaf in enumerate(leaves)]

    def _tried(
        self,
        node: fx.Node,
        run: Callable[..., Any],
        values: Mapping[fx.Node, Any],
        trials: Sequence[Mapping[fx.Node, Any]],
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
        try:
            with torch.no_grad(), WithoutDraws():
                part = tree_flatten(_first_that_runs(node, run, trials))
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
        count = self._rows + OTHERS
        if len(others) != 1 or part.size(others[0]) != entries * count:
            return None
        for inner in (False, True):
            cut = entries, others[0], inner
            if same(leaf, few_of(part, cut, count, range(1, self._rows + 1)), close=True):
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
        try:
            return self.trial.run(self.node, self.run, args, kwargs)
        except RuntimeError as error:  # of PyTorch, as for shapes that do not fit
            is_step = self.node.op != "call_module"
            if is_step and not isinstance(error, torch.OutOfMemoryError):
                add_note(error, _CUT)
            raise


def _zeroed(run: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
    """Run a step that returns memory; two runs have the same values there, which may be any."""
    result = run(*args, **kwargs)
    result.detach().zero_()
    return result


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and type(tensor) in (Tensor, nn.Parameter)


def _first_that_runs(
    node: fx.Node, run: Callable[..., Any], trials: Sequence[Mapping[fx.Node, Any]]
) -> Any:
    """Run a step on rows beside others far from them or, if that raises, beside equal ones."""
    far, equal = (filled((node.args, node.kwargs), trial.__getitem__) for trial in trials)
    try:
        args, kwargs = far
        return run(*args, **kwargs)
    except AboutToDraw:
        raise
    except Exception:
        args, kwargs = equal
        return run(*args, **kwargs)


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
