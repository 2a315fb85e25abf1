"""From a graph and the modules of the stages to the program of a kind of call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from lightning_gpipe.core.data import map_instances, whole
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.inplace_edits import check_edits, edited
from lightning_gpipe.core.frontends.traced.row_dims import ACROSS, row_dims
from lightning_gpipe.core.frontends.traced.stage_modules import StageModules
from lightning_gpipe.core.frontends.traced.symbolic import function_name
from lightning_gpipe.core.frontends.traced.tracer import Output
from lightning_gpipe.core.frontends.traced.watching import run_under
from lightning_gpipe.core.programs import Method, Program, Step, Value


@dataclass(frozen=True, eq=False)
class Lowered:
    """The program of a kind of call.

    Attributes:
        program: The program.
        outputs: For each value that the forward returns, the index of an output of the program, or
            of an argument: -1 is the first.
        returned: The forward's result, with an :class:`Output` for each value.
    """

    program: Program
    outputs: tuple[int, ...]
    returned: Any

    def __call__(self, run: Callable[..., list[Any]], arguments: Sequence[Any]) -> Any:
        """Run the program; return the forward's result."""
        results = run(self.program, list(arguments)) if self.program.outputs else []
        values = [results[k] if k >= 0 else arguments[-k - 1] for k in self.outputs]
        return map_instances(Output, lambda output: values[output.index], self.returned)


def lower(graph: CallGraph, modules: StageModules) -> Lowered:
    """Make the program of a graph; raise UnsupportedForward if it cannot run in stages."""
    lowering = _Lowering(graph, modules)
    for node in graph.nodes:
        if node.op != "get_attr":
            lowering.add(node)
    outputs = [lowering.output(node) for node in graph.outputs]
    computed = list(dict.fromkeys(number for number in outputs if number >= 0))
    inputs = range(len(graph.inputs))
    program = Program(lowering.steps, inputs=inputs, outputs=computed, n=modules.own.n)
    indices = tuple(computed.index(number) if number >= 0 else number for number in outputs)
    return Lowered(program, indices, graph.returned)


class _Lowering:
    """The steps of a graph, as they are added."""

    def __init__(self, graph: CallGraph, modules: StageModules) -> None:
        self.steps: list[Step] = []
        self._graph, self._modules = graph, modules
        self._stages = modules.own.stages(graph)
        check_edits(graph, self._stages)
        self._dims = row_dims(graph)
        self._numbers: dict[fx.Node, int] = {node: k for k, node in enumerate(graph.inputs)}
        self._count = len(graph.inputs)
        self._reads: dict[tuple[str, int], int] = {}

    def add(self, node: fx.Node) -> None:
        j = self._stages[node]
        value = partial(self._value, j=j)
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        run = self._run(node)
        if node.meta["modes"] != self._graph.modes:
            run = partial(run_under, node.meta["modes"], self._graph.modes, run)
        number = self._next()
        self._numbers[node] = number
        self.steps.append(
            Step(run, _plain(args), number, j, _plain(kwargs), _name(node), node.meta["line"])
        )

    def output(self, node: fx.Node) -> int:
        """Return the number of a value that the forward returns; of an argument -1 - its index."""
        if node.op == "placeholder":
            return -1 - self._numbers[node]
        if node.op == "get_attr":
            j = self._modules.own.n - 1
            number = self._value(node, j).number
        else:
            j, number = self._stages[node], self._numbers[node]
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
            return Value(self._numbers[node])
        path = str(node.target)
        slot = self._modules.slot(path, j)
        if slot is None:
            raise UnsupportedForward(
                f"a parameter or buffer must be on the stage that first uses it: {path} is "
                f"used on stage {j}, at {node.meta['line']}, and was not when the model was "
                "cut. Do not replace it after setup, and read it in a module of its own."
            )
        k, module, name = slot
        if (path, k) not in self._reads:
            number = self._reads[path, k] = self._next()
            self.steps.insert(0, Step(partial(getattr, module, name), (), number, k, name=path))
        return Value(self._reads[path, k])

    def _run(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_method":
            return Method(str(node.target))
        if node.op == "call_function":
            assert callable(node.target)
            base = node.args[0] if node.target is operator.getitem else None
            if isinstance(base, fx.Node) and self._dims.get(base) == 0 and needs_look(node):
                return partial(get_rows, line=node.meta["line"])
            return node.target
        layer = self._graph.layer(node)
        owned = layer in self._modules.own.owners
        run = layer if owned else partial(run_copy, layer, layer.training)
        of_torch = type(layer).__module__.startswith("torch.nn.")
        if of_torch or edited(self._graph, node) is not None or not self._used_later(node):
            return run
        return partial(run_unedited, run, f"{node.target}, called at {node.meta['line']},")

    def _used_later(self, node: fx.Node) -> bool:
        """Return whether a later step, or the model's caller, uses an argument of a step."""
        later = set(self._graph.nodes[self._graph.nodes.index(node) + 1 :])
        arguments = node.all_input_nodes
        return any(later & set(x.users) or x in self._graph.outputs for x in arguments)


def needs_look(node: fx.Node) -> bool:
    """Return whether only a run tells if ``x[index]`` takes rows by number."""
    base, index = node.args[0], node.args[1]
    if isinstance(index, int):  # of a tuple, or of a tensor
        return isinstance(base, fx.Node) and base.op == "call_module"
    first = _first(index)
    return isinstance(first, fx.Node) and function_name(first) != "arange"


def get_rows(value: Any, index: Any, *, line: str) -> Any:
    """Return ``value[index]`` of a value with its rows in dim 0.

    Raises:
        UnsupportedForward: If it takes rows of a tensor by their number; names the user's line.
    """
    first = _first(index)
    # Neither bool nor uint8, which are masks.
    numbers = isinstance(first, Tensor) and first.dtype.itemsize > 1
    if isinstance(value, Tensor) and (numbers or isinstance(first, int)):
        raise UnsupportedForward(ACROSS.format(line=line, what="takes rows by their number"))
    return operator.getitem(value, index)


def _first(index: Any) -> Any:
    return index[0] if isinstance(index, tuple) and index else index


def run_copy(layer: nn.Module, training: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Run a copy of a layer without state that several stages run, maybe at the same time.

    Its attributes are those of now, but its training mode that of the trace: the layer's may have
    changed when its call is recomputed.
    """
    copy = layer.__new__(type(layer))
    copy.__dict__.update(layer.__dict__, training=training)
    return copy(*args, **kwargs)


def run_unedited(run: Callable[..., Any], title: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a layer, and raise UnsupportedForward if it has edited an argument.

    The arguments are used later: another stage has tensors of its own, which would not be edited
    as in the plain module.
    """
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    counted = [(x, x._version) for x in tensors if not x.is_inference()]
    returned = run(*args, **kwargs)
    if any(x._version != before for x, before in counted):
        raise UnsupportedForward(
            f"a layer must not edit an argument that is used later: {title} has done "
            "so, which other stages would not see. Edit a copy, as in x = x.clone()."
        )
    return returned


def _marked(value: Any) -> Any:
    """Mark a tensor that is the same for every micro-batch, and returned once."""
    return whole(value) if isinstance(value, Tensor) else value


def _plain(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_plain(child) for child in tree]
    if isinstance(tree, dict):
        return {key: _plain(child) for key, child in tree.items()}
    if type(tree) is tuple:
        return tuple(map(_plain, tree))
    return tree


def _name(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    within = node.meta["within"]
    return f"{within[-1][1]}: {function_name(node)}" if within else function_name(node)
