"""In which dim the values of a traced forward have their rows, and what computes across them.

A stage has the rows of a micro-batch. Between layers, ``x - x.mean(0)``, a softmax or a sort along
the rows, ``x[0]`` or ``x @ x.t()`` would see those alone, and give something else than the plain
module. Shapes are not known yet, but the steps tell where rows go: arguments and what layers return
have them in dim 0, ``transpose(0, 1)`` moves them, ``x.view(n, -1)`` leaves them. Where this cannot
be told, such as after ``transpose(-1, -2)``, nothing is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.frontends.traced.indexing import ACROSS, TakesRows, dim_after
from lightning_gpipe.core.frontends.traced.numbers import rows_in
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.symbolic import set_item
from lightning_gpipe.core.frontends.traced.values import Kind, node_kind


def row_dims(graph: Graph) -> dict[fx.Node, int | None]:
    """Where the values of a graph that have rows have them; None for what cannot be told.

    Raises:
        Refused: If a step between layers computes across rows. Names the line.
    """
    rows = rows_in(graph).values
    dims: dict[fx.Node, int | None] = {node: 0 for node in graph.inputs if node in rows}
    for node in graph.nodes:
        if node not in rows:
            continue
        call = Call(node, dims)
        try:
            dims[node] = _common(call) if node.op == "call_module" else _dim_after(call)
        except _Across as error:
            raise Refused(ACROSS.format(line=node.meta["line"], what=error)) from None
    return dims


class _Across(Exception):
    """A step computes across rows."""


class Call:
    """A function or method of a step, and its arguments.

    Args:
        node: The step.
        dims: Where the values before it have their rows.

    Attributes:
        node: The step.
        name: The name of the function.
        args, kwargs: Its arguments.
        dim: Where its first argument, or the first tensor in it, has rows.
        rows: Where each of the values that it gets has them.
    """

    def __init__(self, node: fx.Node, dims: Mapping[fx.Node, int | None]) -> None:
        target: Any = node.target
        self.node = node
        self.name: str = target if isinstance(target, str) else getattr(target, "__name__", "")
        self.args, self.kwargs = list(node.args), node.kwargs
        self._dims = dims
        self.rows = [dims[each] for each in node.all_input_nodes if each in dims]
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        within = [self.of(each) for each in (first if isinstance(first, list | tuple) else [first])]
        self.dim = next((each for each in within if each is not None), None)

    def of(self, value: Any) -> int | None:
        """Where an argument has rows."""
        return self._dims.get(value) if isinstance(value, fx.Node) else None

    def at(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument, by position or name."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def sizes(self, name: str) -> Sequence[Any]:
        """Sizes or dims that follow the first argument, one by one or in a list."""
        given = self.args[1:] or [self.kwargs.get(name, ())]
        return given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given


def _dim_after(call: Call) -> int | None:
    if call.name == "einsum":
        return _einsum(call)
    rule = _RULES.get(call.name)
    if rule is None:
        return _common(call)
    return None if call.dim is None else rule(call, call.dim)


def _common(call: Call) -> int | None:
    """Where a layer or an elementwise function leaves rows: as it gets them."""
    known = set(call.rows) - {None}
    return known.pop() if len(known) == 1 else None


def _einsum(call: Call) -> int | None:
    inputs, _, output = str(call.args[0]).replace(" ", "").partition("->")
    operands = call.sizes("operands")
    if "." in inputs or not output:
        return None
    dims = zip(inputs.split(","), map(call.of, operands), strict=False)
    letters = {each[dim] for each, dim in dims if dim is not None and dim < len(each)}
    if len(letters) > 1 or not letters <= set(output):
        raise _Across("multiplies rows with rows, or sums over them")
    return output.index(letters.pop()) if letters else None


def _along(position: int, *, removes: bool = False, default: Any = None) -> Rule:
    """The rule for what computes along some dims.

    Args:
        position: That of the argument for the dims.
        removes: Whether these dims are gone afterwards, unless ``keepdim``.
        default: The dims if none are given.
    """

    def rule(call: Call, dim: int) -> int | None:
        given = call.at(position, "dim", "dims", "axis", default=default)
        dims = given if isinstance(given, list | tuple) else [given]
        if dim in dims:
            raise _Across(f"computes {call.name} along dim {dim}")
        if not removes or call.at(position + 1, "keepdim", default=False):
            return dim
        if not all(isinstance(each, int) for each in dims):
            return None
        return dim - sum(0 <= each < dim for each in dims)

    return rule


def _everything(call: Call, _: int) -> int | None:
    raise _Across(f"computes {call.name} over all rows")


def _unknown(_: Call, __: int) -> int | None:
    return None


def _roll(call: Call, dim: int) -> int | None:
    if call.at(2, "dims", default=()) in ((), []):
        raise _Across("rolls all rows")
    return _along(2)(call, dim)


def _transpose(call: Call, dim: int) -> int | None:
    one, other = call.at(1, "dim0", "axis0"), call.at(2, "dim1", "axis1")
    if not all(isinstance(each, int) and each >= 0 for each in (one, other)):
        return None
    return {one: other, other: one}.get(dim, dim)


def _t(_: Call, dim: int) -> int | None:
    return {0: 1, 1: 0}.get(dim)


def _permute(call: Call, dim: int) -> int | None:
    order = call.sizes("dims")
    if not all(isinstance(each, int) for each in order):
        return None
    moved = [each % len(order) for each in order]
    return moved.index(dim) if dim in moved else None


def _sized(call: Call, dim: int) -> int | None:
    """Rows stay outermost if the first size is not a number of its own."""
    sizes = call.sizes("shape")
    fixed = not sizes or (isinstance(sizes[0], int) and sizes[0] != -1)
    return 0 if dim == 0 and not fixed else None


def _flatten(call: Call, dim: int) -> int | None:
    start = call.at(1, "start_dim", default=0)
    apart = isinstance(start, int) and start > dim
    return dim if apart or dim == 0 else None


def _unsqueeze(call: Call, dim: int) -> int | None:
    at = call.at(1, "dim")
    if at == -1:
        return dim
    return dim + (at <= dim) if isinstance(at, int) and at >= 0 else None


def _squeeze(call: Call, dim: int) -> int | None:
    at = call.at(1, "dim")
    return dim - (at < dim) if isinstance(at, int) and at >= 0 else None


def _stack(call: Call, dim: int) -> int | None:
    at = call.at(1, "dim", default=0)
    return dim + (at <= dim) if isinstance(at, int) and at >= 0 else None


def _matmul(call: Call, dim: int) -> int | None:
    other = call.of(call.at(1, "other", "mat2", "weight"))
    if other is not None and (call.name == "linear" or other != dim):
        raise _Across("multiplies rows with rows")
    return dim


def _batch_norm(call: Call, dim: int) -> int | None:
    if call.at(5, "training", default=False):
        raise _Across("normalizes over all rows, where nn.BatchNorm would be a layer")
    return dim


def _attribute(call: Call, dim: int) -> int | None:
    name = call.at(1, "name")
    if name == "T":
        return _t(call, dim)
    return dim if name in ("data", "real", "imag") else None


def _item(call: Call, dim: int) -> int | None:
    base, index = call.args[0], call.args[1]
    assert isinstance(base, fx.Node)
    if isinstance(index, int | str) and not _is_tensor(base):  # maybe of a tuple, or a dict
        return dim if index == 0 or base.op != "call_module" else None
    try:
        return dim_after(dim, index)
    except TakesRows:
        raise _Across("takes some of the rows") from None


def _set(call: Call, dim: int) -> int | None:
    _item(call, dim)
    return dim


def _is_tensor(node: fx.Node) -> bool:
    """Whether a value is a tensor for certain: what a caller will give may be a tuple or a dict."""
    made = node
    while made.op != "placeholder" and made.args and isinstance(made.args[0], fx.Node):
        if made.target is not operator.getitem and made.op != "call_method":
            break
        made = made.args[0]
    return node_kind(node) is Kind.TENSOR and bool(made.meta.get("certain", True))


Rule = Callable[[Call, int], int | None]
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
    ("matmul mm linear", _matmul),
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
        "index_copy index_fill narrow",
        _along(1),
    ),
    ("topk take_along_dim diff normalize renorm", _along(2)),
    ("roll", _roll),
    ("unique nonzero histc bincount cov corrcoef trace pdist msort flipud", _everything),
    ("movedim moveaxis diagonal unfold rot90 kron outer ger cdist tensordot", _unknown),
    ("getattr", _attribute),
    (operator.getitem.__name__, _item),
    (set_item.__name__, _set),
]
_RULES = {name: rule for names, rule in _TABLE for name in names.split()}
