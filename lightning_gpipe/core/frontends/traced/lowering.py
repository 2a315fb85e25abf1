"""From a graph and what the stages hold to the program of a kind of call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from lightning_gpipe.core.data import map_instances, whole
from lightning_gpipe.core.frontends.traced.edits import check_edits, edited
from lightning_gpipe.core.frontends.traced.graph import Graph, Output
from lightning_gpipe.core.frontends.traced.holding import Held
from lightning_gpipe.core.frontends.traced.indexing import Item, needs_look
from lightning_gpipe.core.frontends.traced.modes import Under
from lightning_gpipe.core.frontends.traced.numbers import check_numbers
from lightning_gpipe.core.frontends.traced.ownership import Ownership
from lightning_gpipe.core.frontends.traced.reductions import check_reductions
from lightning_gpipe.core.frontends.traced.refused import Refused
from lightning_gpipe.core.frontends.traced.row_dims import row_dims
from lightning_gpipe.core.plan import Method, Program, Step, Value


@dataclass(frozen=True, eq=False)
class Lowered:
    """The program of a kind of call.

    Attributes:
        program: The program.
        inputs: The indices of the arguments that it needs.
        outputs: For each value that the forward returns, the index of an argument (negative: -1 is
            the first) or of an output of the program.
        returned: What the forward returns, with :class:`Output` for each value.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    returned: Any

    def __call__(self, run: Callable[..., list[Any]], given: Sequence[Any]) -> Any:
        """What the forward returns for these arguments."""
        made = run(self.program, [given[k] for k in self.inputs]) if self.program.outputs else []
        values = [made[k] if k >= 0 else given[-k - 1] for k in self.outputs]
        if type(self.returned) is Output:
            return values[self.returned.index]
        return map_instances(Output, lambda each: values[each.index], self.returned)


def lower(graph: Graph, own: Ownership, held: Held) -> Lowered:
    """The program of a graph.

    Raises:
        Refused: If it cannot run in stages.
    """
    stages = own.stages(graph)
    check_edits(graph, stages)
    check_numbers(graph)
    check_reductions(graph)
    dims = row_dims(graph)
    lowering = _Lowering(graph, own, held, stages, dims)
    for node in graph.nodes:
        if node.op != "get_attr":
            lowering.add(node, stages[node])
    outputs = [lowering.output(node) for node in graph.outputs]
    made = list(dict.fromkeys(each for each in outputs if each >= 0))
    inputs = [lowering.numbers[node] for node in graph.inputs]
    program = Program(lowering.steps, inputs=inputs, outputs=made, n=own.n)
    indices = tuple(made.index(each) if each >= 0 else each for each in outputs)
    return Lowered(program, tuple(range(len(inputs))), indices, graph.returned)


class _Lowering:
    """The steps of a graph, as they are added."""

    def __init__(
        self,
        graph: Graph,
        own: Ownership,
        held: Held,
        stages: dict[fx.Node, int],
        dims: dict[fx.Node, int | None],
    ) -> None:
        self.steps: list[Step] = []
        self.numbers: dict[fx.Node, int] = {node: k for k, node in enumerate(graph.inputs)}
        self._graph, self._own, self._held, self._stages = graph, own, held, stages
        self._dims = dims
        self._count = len(graph.inputs)
        self._reads: dict[tuple[str, int], int] = {}

    def add(self, node: fx.Node, j: int) -> None:
        """Add the step of a node."""
        value = partial(self._value, j=j)
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        run = self._run(node)
        if node.meta["modes"] != self._graph.modes:
            run = Under(run, node.meta["modes"], self._graph.modes)
        number = self._next()
        self.numbers[node] = number
        self.steps.append(
            Step(run, _plain(args), number, j, _plain(kwargs), _name(node), node.meta["line"])
        )

    def output(self, node: fx.Node) -> int:
        """The number of a value that the forward returns; of an argument -1 - its index."""
        if node.op == "placeholder":
            return -1 - self.numbers[node]
        if node.op == "get_attr":
            j, number = self._own.n - 1, self._value(node, self._own.n - 1).number
        else:
            j, number = self._stages[node], self.numbers[node]
        if node in self._dims:
            return number
        once = self._next()
        self.steps.append(Step(_marked, (Value(number),), once, j, name=_name(node)))
        return once

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _value(self, node: fx.Node, j: int) -> Value:
        if node.op != "get_attr":
            return Value(self.numbers[node])
        path = str(node.target)
        found = self._held.slot(path, j)
        if found is None:
            raise Refused(
                f"a parameter or buffer must be on the stage that first uses it: {path} is "
                f"used on stage {j}, at {node.meta['line']}, and was not when the model was "
                "cut. Do not replace it after setup, and read it in a module of its own."
            )
        k, slot = found
        if (path, k) not in self._reads:
            number = self._reads[path, k] = self._next()
            self.steps.insert(0, Step(slot, (), number, k, name=path))
        return Value(self._reads[path, k])

    def _run(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_method":
            return Method(str(node.target))
        if node.op == "call_function":
            assert callable(node.target)
            base = node.args[0] if node.target is operator.getitem else None
            if isinstance(base, fx.Node) and self._dims.get(base) == 0 and needs_look(node):
                return Item(node.meta["line"])
            return node.target
        layer = self._graph.layer(node)
        run = layer if layer in self._own.owners else Shared(layer)
        own = type(layer).__module__.startswith("torch.nn.")
        if own or edited(self._graph, node) is not None or not self._used_later(node):
            return run
        return Unedited(run, f"{node.target}, called at {node.meta['line']},")

    def _used_later(self, node: fx.Node) -> bool:
        """Whether a later step, or the model's caller, uses an argument of a step."""
        later = set(self._graph.nodes[self._graph.nodes.index(node) + 1 :])
        given = node.all_input_nodes
        return any(later & set(each.users) or each in self._graph.outputs for each in given)


class Shared:
    """Runs a layer without state that several stages run, maybe at the same time.

    Each call runs a copy, with all attributes but the training mode as they are now: that of the
    layer may have changed when its call is recomputed.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._training = layer.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer.__new__(type(self._layer))
        layer.__dict__.update(self._layer.__dict__, training=self._training)
        return layer(*args, **kwargs)


class Unedited:
    """Runs a layer whose input is used later, and must not be edited by it.

    Another stage has a tensor of its own, which would not be edited as in the plain module.

    Args:
        run: The layer.
        title: What an error calls it.
    """

    def __init__(self, run: Callable[..., Any], title: str) -> None:
        self._run, self._title = run, title

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns.

        Raises:
            Refused: If it has edited an argument.
        """
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        counted = [(x, x._version) for x in given if not x.is_inference()]
        returned = self._run(*args, **kwargs)
        if any(x._version != before for x, before in counted):
            raise Refused(
                f"a layer must not edit an argument that is used later: {self._title} has done "
                "so, which other stages would not see. Edit a copy, as in x = x.clone()."
            )
        return returned


def _marked(value: Any) -> Any:
    """A value that is the same for every micro-batch, and returned once."""
    return whole(value) if isinstance(value, Tensor) else value


def _plain(tree: Any) -> Any:
    """Arguments of a node, in Python's own lists and dicts."""
    if isinstance(tree, list):
        return [_plain(each) for each in tree]
    if isinstance(tree, dict):
        return {key: _plain(each) for key, each in tree.items()}
    if type(tree) is tuple:
        return tuple(map(_plain, tree))
    return tree


def _name(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    within = node.meta["within"]
    return f"{within[-1][1]}: {what}" if within else str(what)
