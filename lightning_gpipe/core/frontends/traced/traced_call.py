"""A call in a traced forward, and the dims of the rows in its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from lightning_gpipe.core.frontends.traced.call_graph import UnsupportedForward
from lightning_gpipe.core.frontends.traced.symbolic import function_name


def across_rows(line: str, what: str) -> UnsupportedForward:
    """Return the error of a step that computes across rows."""
    return UnsupportedForward(
        "a forward must not compute across the rows of a mini-batch, since a stage has those of a "
        f"micro-batch: {line} {what}. Compute it outside of the model; or, if each micro-batch may "
        "count for itself, in a module of its own, which runs as one layer."
    )


class TracedCall:
    """A function or method of a step (empty ``name``: a layer), and its arguments.

    ``rows`` are the dims of the rows in all arguments, ``dim`` that in the first one, or its first
    tensor.
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
        return self._dims.get(value) if isinstance(value, fx.Node) else None

    def depends(self, value: Any) -> bool:
        """Return whether an argument depends on the rows."""
        return isinstance(value, fx.Node) and value in self._dims

    def at(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def sizes(self, name: str) -> Sequence[Any]:
        rest = self.args[1:] or [self.kwargs.get(name, ())]
        return rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
