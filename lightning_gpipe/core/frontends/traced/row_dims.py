"""The dim of the rows in each value of a traced forward, and a check of steps across the rows.

A stage has the rows of a micro-batch. Between layers, ``x - x.mean(0)``, a softmax or a sort along
the rows, ``x[0]`` or ``x @ x.t()`` would see those alone, and give something else than the plain
module. Shapes are not known yet, but the steps tell where rows go: arguments and the outputs of
layers have them in dim 0, ``transpose(0, 1)`` moves them, ``x.view(n, -1)`` leaves them. Where this
cannot be told, such as after ``transpose(-1, -2)``, nothing is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.row_checks import (
    dim_of_size,
    is_elementwise,
    is_filled,
    rows_in,
)
from lightning_gpipe.core.frontends.traced.symbolic import (
    ValueKind,
    first_input,
    function_name,
    kind_of,
    set_item,
)


def across_rows(line: str, what: str) -> UnsupportedForward:
    """Return the error of a step that computes across rows."""
    return UnsupportedForward(
        "a forward must not compute across the rows of a mini-batch, since a stage has those of a "
        f"micro-batch: {line} {what}. Compute it outside of the model; or, if each micro-batch may "
        "count for itself, in a module of its own, which runs as one layer."
    )


def row_dims(graph: CallGraph) -> dict[fx.Node, int | None]:
    """Return the dim of the rows in each value that has rows; None where it cannot be told."""
    rows, counts = rows_in(graph)
    dims: dict[fx.Node, int | None] = {node: 0 for node in graph.inputs if node in rows}
    for node in graph.nodes:
        if node in rows:
            filled = is_filled(node)
            dims[node] = dim_of_size(node, counts) if filled else _dim_after(TracedCall(node, dims))
    return dims


class TracedCall:
    """A function or method of a step, and its arguments.

    Attributes:
        name: The name of the function; empty for a layer.
        line: The user's line.
        dim: The dim of the rows in its first argument, or in the first tensor in that.
        rows: The dims of the rows in all arguments.
    """

    def __init__(self, node: fx.Node, dims: Mapping[fx.Node, int | None]) -> None:
        self.name, self.line = function_name(node), node.meta["line"]
        self.args, self.kwargs = list(node.args), node.kwargs
        self._dims = dims
        self.rows = {dims[x] for x in node.all_input_nodes if x in dims} - {None}
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        within = map(self.of, first if isinstance(first, list | tuple) else [first])
        self.dim = next((dim for dim in within if dim is not None), None)

    def of(self, value: Any) -> int | None:
        """Return the dim of the rows in an argument."""
        return self._dims.get(value) if isinstance(value, fx.Node) else None

    def at(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def sizes(self, name: str) -> Sequence[Any]:
        """Return sizes or dims that follow the first argument, one by one or in a list."""
        rest = self.args[1:] or [self.kwargs.get(name, ())]
        return rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest


def _dim_after(call: TracedCall) -> int | None:
    if call.name == "einsum":
        return _einsum(call)
    rule = _RULES.get(call.name)
    if rule is not None:
        return None if call.dim is None else rule(call, call.dim)
    if call.name and call.rows - {0} and not is_elementwise(call.name.rstrip("_")):
        raise across_rows(call.line, f"computes {call.name} of rows that are not in dim 0")
    # A layer, or an elementwise function: rows stay in their dim.
    return next(iter(call.rows)) if len(call.rows) == 1 else None


def _einsum(call: TracedCall) -> int | None:
    inputs, _, output = str(call.args[0]).replace(" ", "").partition("->")
    operands = call.sizes("operands")
    if "." in inputs or not output:
        return None
    dims = zip(inputs.split(","), map(call.of, operands), strict=False)
    letters = {names[dim] for names, dim in dims if dim is not None and dim < len(names)}
    if len(letters) > 1 or not letters <= set(output):
        raise across_rows(call.line, "multiplies rows with rows, or sums over them")
    return output.index(letters.pop()) if letters else None


def _along(position: int, *, removes: bool = False, default: Any = None) -> Rule:
    """The rule for functions along the dims in an argument; the result may lack these dims."""

    def rule(call: TracedCall, dim: int) -> int | None:
        dims = call.at(position, "dim", "dims", "axis", default=default)
        dims = dims if isinstance(dims, list | tuple) else [dims]
        if dim in dims:
            raise across_rows(call.line, f"computes {call.name} along dim {dim}")
        if not removes or call.at(position + 1, "keepdim", default=False):
            return dim
        if not all(isinstance(k, int) for k in dims):
            return None
        return dim - sum(0 <= k < dim for k in dims)

    return rule


def _everything(call: TracedCall, _: int) -> NoReturn:
    raise across_rows(call.line, f"computes {call.name} over all rows")


def _roll(call: TracedCall, dim: int) -> int | None:
    if call.at(2, "dims", default=()) in ((), []):
        raise across_rows(call.line, "rolls all rows")
    return _along(2)(call, dim)


def _transpose(call: TracedCall, dim: int) -> int | None:
    one, other = call.at(1, "dim0", "axis0"), call.at(2, "dim1", "axis1")
    if not all(isinstance(k, int) and k >= 0 for k in (one, other)):
        return None
    return {one: other, other: one}.get(dim, dim)


def _t(_: TracedCall, dim: int) -> int | None:
    return 1 - dim if dim < 2 else None


def _permute(call: TracedCall, dim: int) -> int | None:
    order = call.sizes("dims")
    if not all(isinstance(k, int) for k in order):
        return None
    moved = [k % len(order) for k in order]
    return moved.index(dim) if dim in moved else None


def _sized(call: TracedCall, dim: int) -> int | None:
    """The rule for sizes: rows stay outermost unless the first size is a constant."""
    sizes = call.sizes("shape")
    fixed = not sizes or (isinstance(sizes[0], int) and sizes[0] != -1)
    return 0 if dim == 0 and not fixed else None


def _flatten(call: TracedCall, dim: int) -> int | None:
    start = call.at(1, "start_dim", default=0)
    apart = isinstance(start, int) and start > dim
    return dim if apart or dim == 0 else None


def _unsqueeze(call: TracedCall, dim: int) -> int | None:
    at = call.at(1, "dim")
    if at == -1:
        return dim
    return dim + (at <= dim) if isinstance(at, int) and at >= 0 else None


def _squeeze(call: TracedCall, dim: int) -> int | None:
    at = call.at(1, "dim")
    return dim - (at < dim) if isinstance(at, int) and at >= 0 else None


def _stack(call: TracedCall, dim: int) -> int | None:
    at = call.at(1, "dim", default=0)
    return dim + (at <= dim) if isinstance(at, int) and at >= 0 else None


def _matmul(call: TracedCall, dim: int) -> int | None:
    other = call.of(call.at(1, "other", "mat2", "weight"))
    crosswise = call.name == "linear" or (call.name == "bmm" and dim != 0)
    if other is not None and (crosswise or other != dim):
        raise across_rows(call.line, "multiplies rows with rows")
    return dim


def _batch_norm(call: TracedCall, dim: int) -> int | None:
    if call.at(5, "training", default=False):
        raise across_rows(
            call.line, "normalizes over all rows, where nn.BatchNorm would be a layer"
        )
    return dim


def _attribute(call: TracedCall, dim: int) -> int | None:
    name = call.at(1, "name")
    if name == "T":
        return _t(call, dim)
    return dim if name in ("data", "real", "imag") else None


def _item(call: TracedCall, dim: int) -> int | None:
    base, index = call.args[0], call.args[1]
    assert isinstance(base, fx.Node)
    if isinstance(index, int | str) and not _is_tensor(base):  # maybe of a tuple, or a dict
        return dim if index == 0 or base.op != "call_module" else None
    return _indexed(call, dim, index)


def _indexed(call: TracedCall, dim: int, index: Any) -> int | None:
    """Return the dim of the rows in ``x[index]``, where they are in ``dim`` of x."""
    before = 0  # dims of the result
    at = 0  # of x
    for item in index if isinstance(index, tuple) else (index,):
        if at > dim:
            break
        if item is Ellipsis:
            return before if at == dim else None
        is_number = isinstance(item, fx.Node) and kind_of(item) is ValueKind.NUMBER
        if at == dim and item is not None:
            if item == slice(None):
                return before
            if isinstance(item, fx.Node) and not is_number:
                return before  # a mask, or one index for each row: see get_rows
            raise across_rows(call.line, "takes some of the rows")
        if not (item is None or isinstance(item, slice | int) or is_number):
            return None
        at += item is not None
        before += item is None or isinstance(item, slice)
    return before + max(0, dim - at)


def _set_item(call: TracedCall, dim: int) -> int | None:
    _item(call, dim)
    return dim


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a value is certainly a tensor: an argument may be a tuple or a dict."""
    source = node
    while source.target is operator.getitem or source.op == "call_method":
        base = first_input(source)
        if base is None:
            break
        source = base
    return kind_of(node) is ValueKind.TENSOR and bool(source.meta.get("certain", True))


Rule = Callable[[TracedCall, int], int | None]
_TABLE: list[tuple[str, Rule]] = [
    ("transpose swapaxes swapdims", _transpose),
    ("t", _t),
    ("permute", _permute),
    ("view reshape expand repeat tile", _sized),
    ("flatten", _flatten),
    ("unsqueeze", _unsqueeze),
    ("squeeze", _squeeze),
    ("stack", _stack),
    ("cat concat concatenate", _along(1, default=0)),
    ("split chunk tensor_split", _along(2, default=0)),
    ("unbind select kthvalue", _along(1, removes=True, default=0)),
    ("matmul mm bmm linear", _matmul),
    ("batch_norm", _batch_norm),
    (
        "mean sum prod std var amax amin max min any all median nanmean nansum nanmedian argmax "
        "argmin logsumexp var_mean std_mean mode count_nonzero aminmax",
        _along(1, removes=True),
    ),
    (
        "norm vector_norm linalg_norm linalg_vector_norm quantile nanquantile",
        _along(2, removes=True),
    ),
    (
        "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip sort argsort "
        "gather scatter scatter_ scatter_add scatter_add_ index_select index_add index_add_ "
        "index_copy index_fill narrow glu",
        _along(1),
    ),
    (
        "topk take_along_dim diff normalize renorm cosine_similarity",
        _along(2),
    ),
    ("roll", _roll),
    ("unique nonzero histc bincount cov corrcoef trace pdist msort flipud as_strided", _everything),
    ("movedim moveaxis diagonal unfold rot90", lambda *_: None),
    ("getattr", _attribute),
    (operator.getitem.__name__, _item),
    (set_item.__name__, _set_item),
]
_RULES = {name: rule for names, rule in _TABLE for name in names.split()}
