"""Layers that torch.compile compiles, in place.

``layer.compile()`` compiles nothing of a layer whose class is PyTorch's own, such as an nn.Linear
or an nn.TransformerEncoderLayer: the compiler skips code of torch that is called by code of torch.
So what is compiled here is a function that calls the layer.

The compiler keeps a few variants of a function, and gives up if it needs more. One function for all
layers would come to that with the ninth kind of layer; one for each layer would compile forty equal
blocks forty times. So there is one for each kind of layer, on each device, in each mode.

The list of variants is searched on several threads, and each search reorders it: one may miss what
it looks for, and compile it again in mid-training. So what makes variants of every layer, whether
its inputs need gradients, tells functions apart, too. What is left are micro-batches of one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_gpipe.core.pipeline import Taken
from lightning_gpipe.core.profile import kind_of

_Call = Callable[..., Any]
_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")
# Those that record CUDA graphs, which belong to the thread that records them.
_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def check_compile(given: Any) -> None:
    """Refuse what torch.compile does not take, or what does not work on several threads.

    Raises:
        TypeError, ValueError: Names the option.
    """
    if isinstance(given, bool):
        return
    if not isinstance(given, dict):
        raise TypeError(
            "compile must be True, False or a dict of options of torch.compile, such as "
            f"{{'mode': 'default'}}: got {given!r}."
        )
    if unknown := sorted(set(given) - set(_OPTIONS)):
        names = ", ".join(map(repr, _OPTIONS))
        raise ValueError(f"compile takes {names}, as torch.compile does: got {unknown}.")
    instead = _GRAPHS.get(given.get("mode") or "")
    if instead is not None or (given.get("options") or {}).get("triton.cudagraphs"):
        raise ValueError(
            "compile must not use CUDA graphs, which belong to one thread, and layers run on "
            f"those of their stages: got compile={given}. Write "
            f"compile={{'mode': {instead or 'default'!r}}}."
        )


class Compilation:
    """The layers that are compiled, from :meth:`begin` to :meth:`release`.

    Args:
        given: Whether to compile, or options of torch.compile.
    """

    def __init__(self, given: bool | dict[str, Any]) -> None:
        self._options: dict[str, Any] | None = None
        if given is not False:
            self._options = {"dynamic": True, **(given if isinstance(given, dict) else {})}
        self._functions: dict[Hashable, _Call] = {}
        self._layers: list[nn.Module] = []
        self._since: float | None = None  # when the first batch began, until it has ended

    def begin(self, found: Callable[[], Sequence[Taken]]) -> None:
        """Let layers be compiled when they are called first.

        Args:
            found: Tells what runs as pipelines.

        Raises:
            ValueError: If something of that has no layers.
        """
        if self._options is None:
            return
        layers = [layer for taken in found() for layer in _layers_of(taken)]
        # Those that the user compiles stay as they are.
        self._layers = [each for each in layers if "_compiled_call_impl" not in vars(each)]
        kinds: dict[Hashable, int] = {}
        for layer in self._layers:
            kind = kinds.setdefault(kind_of(layer), len(kinds))
            vars(layer)["_compiled_call_impl"] = _Compiled(layer, kind, self._function)
        backend = self._options.get("backend", "inductor")
        rank_zero_info(
            f"GPipe compiles {len(self._layers)} layers of {len(kinds)} kinds with torch.compile, "
            f"backend {_name(backend)}, when they run first: the first training batch, and the "
            "first evaluation, take longer."
        )
        self._since = None

    def begin_batch(self) -> None:
        """Tell how long the first training batch took, once the second begins."""
        if not self._layers:
            return
        if self._since is None:
            self._since = time.perf_counter()
        elif self._since:
            taken, self._since = time.perf_counter() - self._since, 0.0
            rank_zero_info(
                f"GPipe: the first training batch took {taken:.1f} s, to compile "
                f"{len(self._functions)} functions included. Others of these kinds, on "
                "micro-batches of other sizes, use the same code; one row has code of its own."
            )

    def release(self) -> None:
        """Let the layers run as they are."""
        for layer in self._layers:
            if isinstance(vars(layer).get("_compiled_call_impl"), _Compiled):
                del vars(layer)["_compiled_call_impl"]
        self._layers, self._functions = [], {}

    def _function(self, key: Hashable) -> _Call:
        """What calls a layer of a kind, on a device, in a mode."""
        found = self._functions.get(key)
        if found is None:
            assert self._options is not None
            found = self._functions.setdefault(key, torch.compile(_caller(), **self._options))
        return found


class _Compiled:
    """What runs when a layer is called: code that was compiled for its kind."""

    def __init__(self, layer: nn.Module, kind: int, function: Callable[[Hashable], _Call]) -> None:
        self._layer, self._kind, self._function = layer, kind, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        tensors: Iterable[torch.Tensor] = chain(layer.parameters(), layer.buffers())
        device = next((each.device for each in tensors), None)
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), layer.training
        inputs = tuple(_needs_gradient(each) for each in (*args, *kwargs.values()))
        return self._function((self._kind, device, mode, inputs))(layer, *args, **kwargs)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _caller() -> _Call:
    """A function that calls a layer; the compiler keeps its variants with its code object."""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(layer)._call_impl(layer, *args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _layers_of(taken: Taken) -> Iterable[nn.Module]:
    if not isinstance(taken.module, nn.Sequential | nn.ModuleList):
        raise ValueError(
            "compile=True compiles the layers of an nn.Sequential or the blocks of an "
            f"nn.ModuleList: got {taken.name}, whose forward is traced. Name one with module=..., "
            "or leave it out, and call compile() on the parts that are worth it."
        )
    return taken.module.children()


def _name(backend: Any) -> str:
    return repr(backend) if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
