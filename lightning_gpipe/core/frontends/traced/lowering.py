"""From a graph and the modules of the stages to the program of a kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, fx, nn

from lightning_gpipe.core.data import map_instances, whole
from lightning_gpipe.core.frontends.traced.call_graph import CallGraph, UnsupportedForward
from lightning_gpipe.core.frontends.traced.inplace_edits import check_edits, edited
from lightning_gpipe.core.frontends.traced.row_dims import RowDims
from lightning_gpipe.core.frontends.traced.row_trial import RowTrial
from lightning_gpipe.core.frontends.traced.stage_modules import StageModules
from lightning_gpipe.core.frontends.traced.symbolic import filled, function_name
from lightning_gpipe.core.frontends.traced.watching import run_under
from lightning_gpipe.core.programs import Method, Program, Step, Value


@dataclass(frozen=True)
class Output:
    """Stands for a value in a forward's result: its number in the program."""

    number: int


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """The program of a kind of call, and its result with an :class:`Output` for each value."""

    program: Program
    returned: Any

    def moved(self, first: int, n: int) -> LoweredProgram:
        return replace(self, program=self.program.moved(first, n))

    def __call__(self, run: Callable[..., list[Any]], arguments: Sequence[Any]) -> Any:
        values = dict(enumerate(arguments))
        if self.program.outputs:
            values |= zip(self.program.outputs, run(self.program, list(arguments)), strict=True)
        return map_instances(Output, lambda output: values[output.number], self.returned)


def lower(graph: CallGraph, modules: StageModules) -> LoweredProgram:
    """Make the program of a graph; raise UnsupportedForward if it cannot run in stages."""
    lowering = _Lowering(graph, modules)
    for node in graph.nodes:
        if node.op != "get_attr":
            lowering.add(node)
    outputs = {node: Output(lowering.output(node).number) for node in graph.outputs}
    inputs = range(len(graph.inputs))
    computed = {x.number: None for x in outputs.values() if x.number not in inputs}
    program = Program(lowering.steps, inputs=inputs, outputs=list(computed), n=modules.own.n)
    return LoweredProgram(program, map_instances(fx.Node, outputs.__getitem__, graph.returned))


class _Lowering:
    """The steps of a graph, as they are added."""

    def __init__(self, graph: CallGraph, modules: StageModules) -> None:
        self.steps: list[Step] = []
        self._graph, self._modules = graph, modules
        self._stages = modules.own.stages(graph)
        check_edits(graph, self._stages)
        self._dims = RowDims(graph)
        self._values = {node: Value(k) for k, node in enumerate(graph.inputs)}
        self._reads: dict[tuple[str, int], Value] = {}
        self._numbers = count(len(graph.inputs))
        found: dict[fx.Node, Sequence[Any]] = {}
        self._trials = [RowTrial(graph, self._dims, found) for _ in range(modules.own.n)]

    def add(self, node: fx.Node) -> None:
        j = self._stages[node]
        value = partial(self._value, j=j)
        args, kwargs = filled((node.args, node.kwargs), value)
        run = self._run(node)
        if node.meta["modes"] != self._graph.modes:
            run = partial(run_under, node.meta["modes"], self._graph.modes, run)
        number = next(self._numbers)
        self._values[node] = Value(number)
        name, line, trial = _name(node), node.meta["line"], self._trials[j].of(node, run)
        self.steps.append(Step(run, args, number, j, kwargs, name, line, trial=trial))

    def output(self, node: fx.Node) -> Value:
        j = self._stages.get(node, self._modules.own.n - 1)
        value = self._value(node, j)
        if node.op == "placeholder" or node in self._dims:
            return value
        once = next(self._numbers)
        self.steps.append(Step(_marked, (value,), once, j, name=_name(node)))
        return Value(once)

    def _value(self, node: fx.Node, j: int) -> Value:
        if node.op != "get_attr":
            return self._values[node]
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
            number = next(self._numbers)
            self._reads[path, k] = Value(number)
            self.steps.insert(0, Step(partial(getattr, module, name), (), number, k, name=path))
        return self._reads[path, k]

    def _run(self, node: fx.Node) -> Callable[..., Any]:
        if node.op == "call_method":
            return Method(str(node.target))
        if node.op == "call_function":
            assert callable(node.target)
            return node.target
        layer = self._graph.layer(node)
        owned = layer in self._modules.own.owners
        run = layer if owned else partial(run_copy, layer, layer.training)
        if type(layer).__call__ is not nn.Module.__call__ and owned:  # which was traced through
            run = partial(nn.Module.__call__, layer)
        of_torch = type(layer).__module__.startswith("torch.nn.")
        if of_torch or edited(self._graph, node) is not None or not self._used_later(node):
            return run
        return partial(run_unedited, run, f"{node.target}, called at {node.meta['line']},")

    def _used_later(self, node: fx.Node) -> bool:
        """Return whether a later step, or the model's caller, uses an argument of a step."""
        later = set(self._graph.nodes[self._graph.nodes.index(node) + 1 :])
        arguments = node.all_input_nodes
        return any(later & set(x.users) or x in self._graph.outputs for x in arguments)


def run_copy(layer: nn.Module, training: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Run a copy of a stateless layer of several stages, in the training mode of the trace.

    That of the layer may have changed when its call is recomputed.
    """
    copy = layer.__new__(type(layer))
    copy.__dict__.update(layer.__dict__, training=training)
    return nn.Module.__call__(copy, *args, **kwargs)


def run_unedited(run: Callable[..., Any], title: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a layer; raise UnsupportedForward if it has edited an argument that other stages use."""
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


def _name(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    within = node.meta["within"]
    return f"{within[-1][1]}: {function_name(node)}" if within else function_name(node)
