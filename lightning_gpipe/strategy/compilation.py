"""Compiles layers in place with torch.compile.

``layer.compile()`` compiles nothing of a layer whose class is PyTorch's own: the compiler skips
code of torch that is called by code of torch. So the compiled function is one of ours that calls
the layer.

The compiler gives up if a function needs more than a few variants. One function for all layers
would reach that limit with the ninth kind of layer; one for each layer would compile forty equal
blocks forty times. So there is one for each kind of layer, on each device, in each mode; and, as a
thread may miss its variant while a search on another reorders the list, for inputs with and without
gradients. The only variants left are micro-batches of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_gpipe.core.faithful import Journal
from lightning_gpipe.core.layout import kind_of, layers_of
from lightning_gpipe.core.pipeline import PipedModule

_Call = Callable[..., Any]
_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")
# Modes that record CUDA graphs, which belong to the thread that records them, and what to write.
_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def check_compile(options: Any) -> None:
    """Raise unless these are options of torch.compile that work on several threads, or a bool."""
    if isinstance(options, bool):
        return
    if not isinstance(options, dict):
        raise TypeError(
            "compile must be True, False or a dict of options of torch.compile, such as "
            f"{{'mode': 'default'}}: got {options!r}."
        )
    if unknown := sorted(set(options) - set(_OPTIONS)):
        names = ", ".join(map(repr, _OPTIONS))
        raise ValueError(f"compile takes {names}, as torch.compile does: got {unknown}.")
    instead = _GRAPHS.get(options.get("mode") or "")
    if instead is not None or (options.get("options") or {}).get("triton.cudagraphs"):
        raise ValueError(
            "compile must not use CUDA graphs, which belong to one thread, and layers run on "
            f"those of their stages: got compile={options}. Write "
            f"compile={{'mode': {instead or 'default'!r}}}."
        )


def compile_layers(
    modules: Iterable[PipedModule], options: Literal[True] | dict[str, Any], changes: Journal
) -> None:
    """Let layers be compiled when they are called first; ``options`` True are the defaults."""
    options = {"dynamic": True, **({} if options is True else options)}
    layers = [layer for piped in modules for layer in _layers_of(piped)]
    # Layers that the user compiles stay as they are.
    plain = [layer for layer in layers if "_compiled_call_impl" not in vars(layer)]
    kinds: dict[Hashable, int] = {}
    functions: dict[Hashable, _Call] = {}
    for layer in plain:
        kind = kinds.setdefault(kind_of(layer), len(kinds))
        compiled = partial(_call, layer, kind, functions, options)
        changes.write([(vars(layer), "_compiled_call_impl", compiled)])
    backend = options.get("backend", "inductor")
    name = repr(backend) if isinstance(backend, str) else getattr(backend, "__name__", backend)
    rank_zero_info(
        f"GPipe compiles {len(plain)} layers of {len(kinds)} kinds with torch.compile, backend "
        f"{name}, when they run first: the first training batch, and the first evaluation, take "
        "longer."
    )


def _call(
    layer: nn.Module,
    kind: int,
    functions: dict[Hashable, _Call],
    options: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors: Iterable[torch.Tensor] = chain(layer.parameters(), layer.buffers())
    device = next((tensor.device for tensor in tensors), None)
    mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), layer.training
    values = (*args, *kwargs.values())
    inputs = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in values)
    key = kind, device, mode, inputs
    function = functions.get(key)
    if function is None:
        function = functions.setdefault(key, torch.compile(_caller(), **options))
    return function(layer, *args, **kwargs)


def _caller() -> _Call:
    """Return a new function that calls a layer, with a code object of its own for its variants."""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(layer)._call_impl(layer, *args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _layers_of(piped: PipedModule) -> Iterable[nn.Module]:
    if not isinstance(piped.module, nn.Sequential | nn.ModuleList):
        raise ValueError(
            "compile=True compiles the layers of an nn.Sequential or the blocks of an "
            f"nn.ModuleList: got {piped.name}, whose forward is traced. Name one with module=..., "
            "or leave it out, and call compile() on the parts that are worth it."
        )
    if isinstance(piped.module, nn.Sequential):
        return layers_of(piped.module).values()
    return piped.module.children()
