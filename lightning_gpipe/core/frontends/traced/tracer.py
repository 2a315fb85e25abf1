"""Traces a module's forward into a graph of torch.fx, with the layers as its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy, TraceError
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_gpipe.core.frontends.lines import checkpointed_line, current_line
from lightning_gpipe.core.frontends.traced.calls import Given
from lightning_gpipe.core.frontends.traced.modes import (
    Modes,
    check_settings,
    function_modes,
    settings,
)
from lightning_gpipe.core.frontends.traced.symbolic import Symbolic
from lightning_gpipe.core.frontends.traced.values import Kind, kind_of
from lightning_gpipe.core.frontends.traced.watching import (
    AUTOWRAPPED,
    Recording,
    any_arguments,
    functions_whole,
    same_randomness,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_layer(module: nn.Module) -> bool:
    """Whether tracing keeps a module as it is: it has no modules in it, is PyTorch's, or has hooks.

    A hook must run whenever the module does, with the values of that run.
    """
    if has_hooks(module) or isinstance(module, torch.jit.ScriptModule | _BatchNorm):
        return True
    if not any(True for _ in module.children()):
        return True
    kind = type(module).__module__
    return kind.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _CONTAINERS)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on a module."""
    return any(hooks_of(module))


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The hooks that run with a module; empty or not."""
    return [vars(module)[name] for name in _HOOKS]


class Tracer(fx.Tracer):
    """Traces one call of a module.

    Args:
        root: The module.
        layers: Further modules to keep as they are.

    Attributes:
        failed: The innermost module whose forward raised while it was traced through.
    """

    def __init__(self, root: nn.Module, layers: Collection[nn.Module]) -> None:
        super().__init__(autowrap_functions=tuple(AUTOWRAPPED.values()))
        self.failed: nn.Module | None = None
        self._layers = layers
        self._paths = {module: path for path, module in root.named_modules()}
        held = [*root.named_parameters(), *root.named_buffers()]
        self._tensors = {id(tensor): (name, tensor) for name, tensor in held}
        self._read: dict[str, Proxy] = {}
        self._within: tuple[tuple[int, str], ...] = ()
        self._entered = 0
        self._forward: Callable[..., list[Any]] = list
        self._inputs: Sequence[Given] = ()
        self._settings: dict[str, Any] = {}
        self._function_modes = 0

    def record(
        self,
        root: nn.Module,
        forward: Callable[..., list[Any]],
        inputs: Sequence[Given],
    ) -> fx.Graph:
        """The graph of ``forward``, called with a value for each input.

        Args:
            root: The module.
            forward: Runs the module's forward; returns its outputs.
            inputs: What is known of each input.
        """
        self._forward, self._inputs = forward, inputs
        self._settings = settings()
        with same_randomness(), Recording(self), any_arguments(self), functions_whole(self):
            self._function_modes = function_modes()
            return self.trace(root)

    def held(self, node: fx.Node) -> Tensor | None:
        """The parameter or buffer that a node reads."""
        if node.op != "get_attr":
            return None
        return next(tensor for name, tensor in self._tensors.values() if name == node.target)

    @override
    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        values = []
        for k, given in enumerate(self._inputs):
            value = self.create_proxy("placeholder", f"input_{k}", (), {})
            value.node.meta.update(vars(given))
            values.append(value)
        forward = self._forward

        def run() -> list[Any]:
            return forward(*values)

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
        node.meta["kind"] = kind_of(node, self.root.get_submodule)
        return node

    @override
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self._tensor(a)
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return a  # an object of the user's

    @override
    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        if isinstance(attr_val, Tensor) and id(attr_val) in self._tensors:
            return self._reading(self._tensors[id(attr_val)][0])
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
        with self._inside(self._paths[m]):
            if m in self._layers or is_layer(m):
                self._check_function_modes()
                return self.create_proxy("call_module", self._paths[m], args, kwargs)
            try:
                return forward(*args, **kwargs)
            except Exception:
                self.failed = self.failed or m
                raise

    def _check_function_modes(self) -> None:
        if function_modes() > self._function_modes:
            raise TraceError(
                "it calls a layer in a TorchFunctionMode, which no stage would know of: enter the "
                "mode around the whole model, or within the layer"
            )

    @contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        outer = self._within
        self._entered += 1
        self._within = (*outer, (self._entered, path))
        try:
            yield
        finally:
            self._within = outer

    def _reading(self, name: str) -> Proxy:
        """The value of a parameter or buffer."""
        if name not in self._read:
            self._read[name] = self.create_proxy("get_attr", name, (), {})
            self._read[name].node.meta["kind"] = Kind.TENSOR
        return self._read[name]

    def _tensor(self, tensor: Tensor) -> Any:
        """A tensor among arguments: one that the model holds, or that its forward made of none."""
        if id(tensor) in self._tensors:
            return self._reading(self._tensors[id(tensor)][0]).node
        if tensor.requires_grad:
            raise TraceError(
                "it computes with parameters that it does not read as attributes of modules"
            )
        return tensor
