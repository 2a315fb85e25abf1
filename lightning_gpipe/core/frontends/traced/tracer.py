"""Traces a module's forward into a graph of torch.fx, with the layers as its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy, TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_gpipe.core.data import map_instances
from lightning_gpipe.core.frontends.lines import checkpointed_line, current_line
from lightning_gpipe.core.frontends.traced.call_kinds import CallKind
from lightning_gpipe.core.frontends.traced.symbolic import Symbolic, infer_kind
from lightning_gpipe.core.frontends.traced.watching import (
    AUTOWRAPPED,
    Modes,
    Reads,
    check_settings,
    function_modes,
    settings,
    watch,
)
from lightning_gpipe.core.layout import hooks_of

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def is_layer(module: nn.Module) -> bool:
    """Return whether tracing keeps a module whole: PyTorch's, with hooks, or with no modules in it.

    A hook must run whenever the module does, with the values of that run.
    """
    if any(hooks_of(module)) or isinstance(module, torch.jit.ScriptModule | _BatchNorm):
        return True
    if not any(True for _ in module.children()):
        return True
    origin = type(module).__module__
    return origin.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _CONTAINERS)


class Tracer(fx.Tracer):
    """Traces one call of a module; modules in ``whole`` stay whole, like those of :func:`is_layer`.

    ``returned`` is the result, with a node for each value, ``failed`` the innermost module whose
    forward raised, and ``attributes`` are the constants that the code read of modules and
    parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        kind: CallKind,
        whole: Collection[nn.Module],
    ) -> None:
        super().__init__(autowrap_functions=AUTOWRAPPED)
        # Where torch.zeros(rows, 3) is looked up, which refuses a number that is not known.
        self._autowrap_search.append(torch)
        self.returned: Any = None
        self.failed: nn.Module | None = None
        self._module, self._forward, self._kind, self._whole = module, forward, kind, whole
        self._paths = {submodule: path for path, submodule in module.named_modules()}
        self._tensors = dict([*module.named_parameters(), *module.named_buffers()])
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._reads: dict[str, Proxy] = {}
        self.attributes: Reads = {}
        self._within: tuple[tuple[int, str], ...] = ()
        self._entries = count()
        self._settings = settings()
        self._function_modes = 0

    def record(self) -> fx.Graph:
        """Return the graph, whose output is a list of the values that the forward returns."""
        with watch(self, self._module, self.attributes):
            self._function_modes = function_modes()
            return self.trace(self._module)

    def tensor_of(self, node: fx.Node) -> Tensor | None:
        return self._tensors[str(node.target)] if node.op == "get_attr" else None

    @override
    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        values = []
        for k, argument in enumerate(self._kind.inputs):
            value = self.create_proxy("placeholder", f"input_{k}", (), {})
            value.node.meta.update(vars(argument))
            values.append(value)

        def run() -> list[Symbolic]:
            outputs: list[Symbolic] = []

            def node_of(value: Symbolic) -> fx.Node:
                outputs.append(value)
                return value.node

            returned = self._kind.call(self._forward, values)
            self.returned = map_instances(Symbolic, node_of, returned)
            return outputs

        return run, []

    @override
    def proxy(self, node: fx.Node) -> Proxy:
        return Symbolic(node, self)

    @override
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = current_line()
        node.meta["checkpointed"] = checkpointed_line()
        check_settings(self._settings)
        node.meta["within"] = self._within
        node.meta["modes"] = Modes.now()
        node.meta["kind"] = infer_kind(node, self.root.get_submodule)
        return node

    @override
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if id(a) in self._names:
                return self._read(a).node
            if a.requires_grad:
                raise TraceError(
                    "it computes with parameters that it does not read as attributes of modules"
                )
            return a  # a constant of the forward
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return a  # an object of the user's

    @override
    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if isinstance(attr_val, Tensor) and id(attr_val) in self._names:
            return self._read(attr_val)
        return attr_val

    @override
    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if m not in self._paths:
            if not any(True for _ in m.children()):
                raise TraceError(f"it calls a {type(m).__name__} that is no module of the model")
            return forward(*args, **kwargs)  # such as layers[1:], of an nn.Sequential
        is_whole = m in self._whole or is_layer(m)
        outer = self._within
        self._within = (*outer, (next(self._entries), self._paths[m]))
        try:
            if not is_whole:
                return forward(*args, **kwargs)
            if function_modes() > self._function_modes:
                raise TraceError(
                    "it calls a layer in a TorchFunctionMode, which no stage would know of: enter "
                    "the mode around the whole model, or within the layer"
                )
            return self.create_proxy("call_module", self._paths[m], args, kwargs)
        except Exception:
            if not is_whole:
                self.failed = self.failed or m
            raise
        finally:
            self._within = outer

    def _read(self, tensor: Tensor) -> Proxy:
        name = self._names[id(tensor)]
        if name not in self._reads:
            self._reads[name] = self.create_proxy("get_attr", name, (), {})
        return self._reads[name]
