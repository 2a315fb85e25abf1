"""Makes operators draw from private generators, see Note [Drawing from private generators]."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_gpipe.core.faithful.journal import patched
from lightning_gpipe.core.faithful.managers import Manager


def default_generator(device: torch.device) -> Generator:
    """Return the generator from which operators on ``device`` draw by default."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def drawing_by_default() -> Manager:
    """A ``with`` block in which operators draw from the default generators in any case."""
    modes = [x for x in _get_current_dispatch_mode_stack() if isinstance(x, _RedirectedDraws)]
    return patched([(vars(mode), "_redirects", False) for mode in modes])


class AboutToDraw(Exception):
    """Raised by an operator that may draw random numbers."""


class WithoutDraws(TorchDispatchMode):
    """Raises :class:`AboutToDraw` before operators of this thread draw random numbers."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` ignore it: the flag is of the process, and threads would race."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _may_draw(func) is not False and _draws_now(func, args, kwargs or {}):
            raise AboutToDraw
        return func(*args, **(kwargs or {}))


class PrivateGenerators:
    """A generator for each micro-batch of stage ``j``, in place of the default ones of ``devices``.

    ``untagged`` has the names of custom operators that drew from the default generators.
    """

    def __init__(
        self, seed: bytes, j: int, devices: Iterable[torch.device], *, grad: bool = False
    ) -> None:
        self.devices = frozenset(devices)
        self.grad = grad
        self.drew = False
        self.untagged: set[str] = set()
        self._seed = seed
        self._j = j

    def drawing(self, i: int) -> Manager:
        digest = blake2b(self._seed + f"{i},{self._j}".encode(), digest_size=8).digest()
        return _RedirectedDraws(int.from_bytes(digest), self)


class _RedirectedDraws(TorchDispatchMode):
    # Held while the default generator of a device has a private state, for one draw.
    _lock = threading.Lock()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` ignore the mode while it compiles, not when its code runs."""
        return True

    def __init__(self, seed: int, private: PrivateGenerators) -> None:
        self.supports_higher_order_operators = True
        super().__init__()
        self._seed = seed
        self._private = private
        self._generators: dict[torch.device, Generator] = {}
        self._redirects = True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._redirects:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return func(*map(self._redirected, args), **kwargs)
        for k, name in _edited_lists(func):  # whose versions PyTorch leaves as they are in a mode
            edited = args[k] if k < len(args) else kwargs.get(name) or ()
            increment_version([x for x in edited if not x.is_inference()])
        tagged = _may_draw(func)
        if tagged is None:
            return self._watched(func, args, kwargs)
        if not tagged or not _draws_now(func, args, kwargs):
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        default = default_generator(device)
        if device not in self._private.devices or not _same(kwargs.get("generator"), default):
            return func(*args, **kwargs)

        if self._private.grad:
            _refuse_checkpointing()
        private = self._generator(device)
        if _takes_generator(func):
            self._private.drew = True
            return func(*args, **{**kwargs, "generator": private})
        with self._lock:
            before, own = default.get_state(), private.get_state()
            default.set_state(own)
            try:
                return func(*args, **kwargs)
            finally:
                private.set_state(default.get_state())
                default.set_state(before)
                self._private.drew |= not torch.equal(own, private.get_state())

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a custom operator, and record whether it draws without being tagged for it."""
        generators = [default_generator(device) for device in self._private.devices]
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        if not all(map(torch.equal, before, (generator.get_state() for generator in generators))):
            self._private.untagged.add(func.name())
        return result

    def _redirected(self, argument: Any) -> Any:
        """Wrap a function among the arguments of an operator, such as a branch, in this mode."""
        if not callable(argument) or isinstance(argument, Tensor):
            return argument

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return run

    def _generator(self, device: torch.device) -> Generator:
        if device not in self._generators:
            self._generators[device] = Generator(device).manual_seed(self._seed)
        return self._generators[device]


_SWITCHES = ("dropout_p", "train", "training")  # arguments without which an operator draws nothing
_WELL_TAGGED = ("aten", "prims")  # the namespaces whose operators are tagged if they draw


def _refuse_checkpointing() -> None:
    """Raise if a layer draws within a ``torch.utils.checkpoint`` of its own.

    Its backward would restore the state of the shared generator and draw another mask from it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None,)
    reentrant = not torch.is_grad_enabled() and _called_by("torch.utils.checkpoint")
    if reentrant or getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint":
        raise RuntimeError(
            "a layer must not draw random numbers under torch.utils.checkpoint in a pipeline whose "
            "workers share a generator, as all do on the CPU: its backward would draw others. Use "
            "the pipeline's activation_checkpointing instead, or checkpoint only what does not "
            "draw."
        )


def _called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def _same(generator: Generator | None, default: Generator) -> bool:
    # The dispatcher makes a new Python object for the same C++ generator.
    return generator is None or generator._cdata == default._cdata  # type: ignore[attr-defined]


@cache
def _may_draw(func: Any) -> bool | None:
    """Return whether the operator is tagged as drawing; None if it is an untagged custom one."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return True
    return False if func.namespace in _WELL_TAGGED else None


@cache
def _edited_lists(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the lists of tensors that the operator edits."""
    return [
        (k, argument.name)
        for k, argument in enumerate(func._schema.arguments)
        if argument.is_write and "List[Tensor]" in str(argument.type)
    ]


@cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _draws_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return False for operators that are tagged as drawing, such as attention, without dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in _SWITCHES:
            by_name = kwargs.get(argument.name, argument.default_value)
            value = args[position] if position < len(args) else by_name
            if value is not None and not value:
                return False
    return True


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    return torch.device(device)
