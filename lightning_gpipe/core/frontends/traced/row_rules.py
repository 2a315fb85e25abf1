"""The rules for the dim of the rows: where a function that a traced forward calls leaves them.

A rule raises if the function computes along that dim. What rules do not tell, a trial does when a
stage first calls the functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lightning_gpipe.core.frontends.traced.symbolic import (
    ValueKind,
    first_input,
    function_name,
    kind_of,
    set_item,
)
from lightning_gpipe.core.frontends.traced.traced_call import TracedCall, across_rows


def after_einsum(call: TracedCall) -> int | None:
    """Return the dim of the rows after ``torch.einsum``, whose first argument is a text."""
    inputs, _, output = str(call.args[0]).replace(" ", "").partition("->")
    operands = call.sizes("operands")
    inputs, output = inputs.replace("...", "."), output.replace("...", ".")
    if not output:
        single = sorted(x for x in set(inputs) - {",", "."} if inputs.count(x) == 1)
        output = "." * ("." in inputs) + "".join(single)
    dims = list(zip(inputs.split(","), map(call.of, operands), strict=False))
    if any("." in names and dim for names, dim in dims):
        return None  # the dots stand for any number of dims
    letters = {names[dim] for names, dim in dims if dim is not None and dim < len(names)}
    if len(letters) > 1 or not letters <= set(output):
        raise across_rows(call.line, "multiplies rows with rows, or sums over them")
    return output.index(letters.pop()) if letters else None


def _along(position: int, *, removes: bool = False, default: Any = None) -> Rule:
    """The rule for functions along the dims in an argument; the result may lack these dims."""

    def rule(call: TracedCall, dim: int) -> int | None:
        dims = call.at(position, "dim", "dims", "axis", default=default)
        dims = dims if isinstance(dims, list | tuple) else [dims]
        if call.dim in dims:
            raise across_rows(call.line, f"computes {call.name} along dim {dim}")
        if not removes or call.at(position + 1, "keepdim", default=False) or dim in (0, -1):
            return dim
        if not all(isinstance(k, int) and (k < 0) == (dim < 0) for k in dims):
            return None
        return dim + sum(dim < k < 0 for k in dims) - sum(0 <= k < dim for k in dims)

    return rule


def _transpose(call: TracedCall, dim: int) -> int | None:
    return _swapped(call, dim, call.at(1, "dim0", "axis0"), call.at(2, "dim1", "axis1"))


def _swapped(call: TracedCall, dim: int, one: Any, other: Any) -> int | None:
    if not (isinstance(one, int) and isinstance(other, int)):
        return None
    return {one: other, other: one}.get(dim, dim)


def _movedim(call: TracedCall, dim: int) -> int | None:
    source, target = call.at(1, "source"), call.at(2, "destination")
    if not (isinstance(source, int) and isinstance(target, int) and min(source, target, dim) >= 0):
        return None
    if dim == source:
        return target
    dim -= source < dim
    return dim + (target <= dim)


def _t(_: TracedCall, dim: int) -> int | None:
    return {0: 1, 1: 0, -1: -2, -2: -1}.get(dim)


def _permute(call: TracedCall, dim: int) -> int | None:
    order = call.sizes("dims")
    if not all(isinstance(k, int) for k in order):
        return None
    moved = [k % len(order) for k in order]
    dim %= len(order)
    return moved.index(dim) if dim in moved else None


def _sized(call: TracedCall, dim: int) -> int | None:
    """The rule for sizes: rows stay outermost unless the first size is a constant."""
    sizes = call.sizes("shape")
    fixed = not sizes or (isinstance(sizes[0], int) and sizes[0] != -1)
    if fixed and call.name in ("view", "reshape") and all(isinstance(k, int) for k in sizes):
        raise across_rows(call.line, f"puts all rows into {call.name} with sizes that are constant")
    return 0 if dim == 0 and not fixed else None


def _renorm(call: TracedCall, dim: int) -> int:
    if call.at(2, "dim") != dim:
        raise across_rows(call.line, "normalizes over all rows")
    return dim


def _flatten(call: TracedCall, dim: int) -> int | None:
    start = call.at(1, "start_dim", default=0)
    apart = isinstance(start, int) and start > dim
    return dim if (apart and dim >= 0) or dim == 0 else None


def _unsqueeze(call: TracedCall, dim: int) -> int | None:
    return _inserted(call, dim, call.at(1, "dim"))


def _inserted(call: TracedCall, dim: int, at: Any) -> int | None:
    """Return the dim of the rows after a new dim was inserted ``at`` a place."""
    if not isinstance(at, int) or (dim < 0 < at):
        return None
    if dim < 0:
        return dim - (dim < at + 1 <= 0)
    if at >= 0:
        return dim + (at <= dim)
    return dim if dim == 0 or at == -1 else None


def _squeeze(call: TracedCall, dim: int) -> int | None:
    at = call.at(1, "dim")
    if not isinstance(at, int):
        return None
    if call.dim == at:
        raise across_rows(call.line, "drops the dim of the rows where there is one")
    if (at < 0) != (dim < 0):
        return dim if dim in (0, -1) else None
    return dim - (0 <= at < dim) + (dim < at < 0)


def _stack(call: TracedCall, dim: int) -> int | None:
    return _inserted(call, dim, call.at(1, "dim", default=0))


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
    if name in ("T", "H"):
        return _t(call, dim)
    if name in ("mT", "mH"):
        return _swapped(call, dim, -2, -1)
    return dim if name in ("data", "real", "imag") else None


def _item(call: TracedCall, dim: int) -> int | None:
    base, index = call.args[0], call.args[1]
    assert isinstance(base, fx.Node)
    if isinstance(index, int | str) and not _is_tensor(base):  # maybe of a tuple, or a dict
        return dim if index == 0 or base.op != "call_module" else None
    if isinstance(index, slice) and _is_sequence(base):
        return dim
    return _indexed(call, dim, index)


def _indexed(call: TracedCall, dim: int, index: Any) -> int | None:
    """Return the dim of the rows in ``x[index]``, where they are in ``dim`` of x."""
    if dim < 0:
        return None
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


def _is_sequence(node: fx.Node) -> bool:
    """Return whether a value is a tuple or list of tensors, as of ``chunk``, or a slice of one."""
    while node.target is operator.getitem and isinstance(node.args[1], slice):
        base = first_input(node)
        if base is None:
            break
        node = base
    name = function_name(node)
    of_torch = node.op == "call_method" or node.target is getattr(torch, name, None)
    return of_torch and name in _PARTS


def _is_tensor(node: fx.Node) -> bool:
    """Return whether a value is certainly a tensor: an argument may be a tuple or a dict."""
    source = node
    while source.target is operator.getitem or source.op == "call_method":
        base = first_input(source)
        if base is None:
            break
        source = base
    return kind_of(node) is ValueKind.TENSOR and bool(source.meta.get("certain", True))


# Functions that reduce all dims unless they get some, by the position of these in the arguments.
REDUCTIONS = {
    1: "mean sum prod std var max min amax amin median nanmean nansum nanmedian any all argmax "
    "argmin count_nonzero var_mean std_mean aminmax",
    2: "norm linalg_norm linalg_vector_norm quantile nanquantile",
}

_RETURN_PARTS = "split chunk unbind tensor_split hsplit vsplit dsplit unsafe_chunk unsafe_split"
_PARTS = frozenset(_RETURN_PARTS.split())

Rule = Callable[[TracedCall, int], int | None]
_TABLE: list[tuple[str, Rule]] = [
    ("transpose swapaxes swapdims", _transpose),
    ("movedim moveaxis", _movedim),
    ("t", _t),
    ("permute", _permute),
    ("view reshape expand repeat tile", _sized),
    ("unflatten", lambda _, dim: 0 if dim == 0 else None),
    ("flatten", _flatten),
    ("unsqueeze", _unsqueeze),
    ("squeeze", _squeeze),
    ("stack", _stack),
    ("cat concat concatenate", _along(1, default=0)),
    ("split chunk tensor_split", _along(2, default=0)),
    ("unbind select kthvalue", _along(1, removes=True, default=0)),
    ("matmul mm bmm linear", _matmul),
    ("batch_norm", _batch_norm),
    *((names, _along(position, removes=True)) for position, names in REDUCTIONS.items()),
    ("logsumexp mode", _along(1, removes=True)),
    ("vector_norm", _along(2, removes=True)),
    (
        "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip sort argsort "
        "gather scatter scatter_ scatter_add scatter_add_ index_select index_add index_add_ "
        "index_copy index_fill narrow glu",
        _along(1),
    ),
    ("topk take_along_dim diff normalize cosine_similarity", _along(2)),
    ("trapezoid trapz cumulative_trapezoid", _along(9, default=-1)),
    ("renorm", _renorm),
    ("getattr", _attribute),
    (operator.getitem.__name__, _item),
    (set_item.__name__, _set_item),
]
RULES = {name: rule for names, rule in _TABLE for name in names.split()}
