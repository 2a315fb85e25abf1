"""Watches a traced forward for what torch.fx does not see.

``with torch.no_grad():`` leaves no trace in a graph, so each recorded call is compared with the
state in which the forward began, and runs under its own where that differs. Settings of the whole
process, such as ``sdpa_kernel``, would act on all stages at once, and are refused.
``torch.zeros(3)``, an autograd function or a random number would be constants of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.fx.proxy import Proxy, TraceError
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import CheckpointFunction
from typing_extensions import override

from lightning_gpipe.core.data import tensors_of
from lightning_gpipe.core.faithful import Autocast, ForeignGenerator, RandomState, has_proxy
from lightning_gpipe.core.frontends.lines import is_users
from lightning_gpipe.core.layout import holders, is_generator, within

_CONSTANTS = frozenset({bool, int, float, str, type(None)})

Reads = dict[tuple[Any, str], Any]  # the attributes of modules and tensors, by name


class Modes(NamedTuple):
    """Grad mode, autocast on each kind of device, and the default device."""

    grad: bool
    autocast: tuple[Autocast, ...]
    device: torch.device | None

    @classmethod
    def now(cls) -> Modes:
        return cls(
            torch.is_grad_enabled(),
            tuple(map(Autocast.of, ("cpu", "cuda"))),
            next((m.device for m in reversed(_stack()) if isinstance(m, DeviceContext)), None),
        )


def run_under(
    modes: Modes, outer: Modes, run: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a call under modes of its own, within those in which the forward began."""
    with ExitStack() as stack:
        if modes.grad != outer.grad:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
        for mine, other in zip(modes.autocast, outer.autocast, strict=True):
            if mine != other:
                stack.enter_context(mine.entered())
        if modes.device is not None and modes.device != outer.device:
            stack.enter_context(modes.device)
        return run(*args, **kwargs)


def settings() -> dict[str, Any]:
    """Return the other settings that a forward may change, by the name of the function for it."""
    cuda = torch.backends.cuda
    return {
        "sdpa_kernel": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "inference_mode": torch.is_inference_mode_enabled(),
        "set_default_dtype": torch.get_default_dtype(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
    }


def check_settings(before: Mapping[str, Any]) -> None:
    """Raise TraceError if the forward has changed settings that stages would not have."""
    for name, value in settings().items():
        if before[name] != value:
            raise TraceError(f"it changes what {name} sets, which no stage would know of")


def function_modes() -> int:
    """Return the number of function modes of this thread, besides ``with torch.device(...)``."""
    return sum(not isinstance(mode, DeviceContext) for mode in _stack())


def _stack() -> list[Any]:
    return [torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack())]


_DRAWN = (
    "it draws random numbers or counts, and these numbers would be the same in every step: draw "
    "them in a module of their own"
)


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(torch, name) for name in names.split())


_FACTORIES = _functions(
    "arange zeros ones full empty eye linspace logspace tensor as_tensor tril_indices triu_indices"
)
_RANDOM = _functions("rand randn randint randperm normal")
AUTOWRAPPED = (*_FACTORIES, *_RANDOM)
_OUTLINE = frozenset({"__get__", "size", "dim", "numel"})  # functions that read no values


class _FunctionRecorder(TorchFunctionMode):
    """Records the calls of PyTorch's functions that a traced forward makes without any value."""

    def __init__(self, tracer: fx.Tracer, reads: Reads) -> None:
        super().__init__()
        self._tracer, self._reads = tracer, reads

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        symbolic = next((kind for kind in types if issubclass(kind, Proxy)), None)
        if symbolic is not None:
            # Function modes of the caller are entered when the call runs, and not now as well.
            return symbolic.__torch_function__(func, types, args, kwargs)
        if func in _RANDOM:
            raise TraceError(_DRAWN)
        if func in _FACTORIES and is_users(sys._getframe(1).f_code.co_filename):
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        if getattr(func, "__name__", "") not in _OUTLINE:  # its result is a constant
            own = (x for x in tensors_of((args, kwargs)) if not x.is_inference())
            self._reads.update({(x, "_version"): x._version for x in own})
        return func(*args, **kwargs)


@contextmanager
def watch(tracer: fx.Tracer, root: nn.Module, reads: Reads) -> Iterator[None]:
    """Record what the tracer does not see itself, in a ``with`` block; refuse random numbers.

    ``reads`` gets the constants that the user's code reads of modules, and of their tensors.
    """
    # PyTorch lists the functions that make tensors when a default device is first in force, and
    # those that the tracer wraps would be on its list for good.
    with torch.device("cpu"):
        torch.empty(0)
    functions = _FunctionRecorder(tracer, reads)
    with _same_randomness(root), functions, _functions_whole(tracer), _attribute_reads(reads):
        yield


@contextmanager
def _attribute_reads(reads: Reads) -> Iterator[None]:
    def read(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if type(value) in _CONSTANTS and is_users(sys._getframe(1).f_code.co_filename):
            reads[module, name] = value
        return value

    nn.Module.__getattribute__ = read  # type: ignore[assignment, method-assign]  # for now
    try:
        yield
    finally:
        del nn.Module.__getattribute__


@contextmanager
def _functions_whole(tracer: fx.Tracer) -> Iterator[None]:
    """Record an autograd function as one call: within, it would run without gradients.

    The function of PyTorch's own activation checkpointing is traced through.
    """
    own = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            function, _, *rest = args
            return function(*rest)
        function = own.__get__(None, cls)
        if has_proxy((args, kwargs)):
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]  # for now
    try:
        yield
    finally:
        Function.apply = own  # type: ignore[method-assign]


@contextmanager
def _same_randomness(root: nn.Module) -> Iterator[None]:
    state = RandomState.of([*RandomState.capture().generators, *_generators([*root.modules()])])
    try:
        yield
        if state.differences():
            raise TraceError(_DRAWN)
    finally:
        state.restore()


def _generators(modules: Sequence[nn.Module]) -> Iterator[ForeignGenerator | torch.Generator]:
    """Yield the generators and counters that modules, or the files of their classes, have."""
    files = {type(module).__module__ for module in modules} & sys.modules.keys()
    spaces = [holder.held for holder in holders(modules)] + [vars(sys.modules[x]) for x in files]
    values = {id(x): x for space in spaces for value in list(space.values()) for x in within(value)}
    for x in values.values():
        if isinstance(x, count):  # which cannot be set back
            yield ForeignGenerator("itertools.count", partial(repr, x), lambda _: None)
        elif is_generator(x):
            yield ForeignGenerator.of(x)
