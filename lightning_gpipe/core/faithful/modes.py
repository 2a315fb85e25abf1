"""PyTorch's function and dispatch modes, which see or change every operation of their thread.

A dispatch mode (``FlopCounterMode``) or a function mode is an object with state, made for one
thread, so while one is active the pipeline runs on the caller's thread.

Recomputation repeats a forward during backward, when the modes of that forward may no longer be
active: the user's ``with`` block has ended, or PyTorch has exited function modes to call backward.
A mode that changes what layers compute must be active again. PyTorch's own dispatch modes are not
entered again: they only observe, and a counter that was read after forward must not continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.faithful.managers import Lazily, Manager

_OBSERVERS = ("torch.", "lightning_gpipe.")  # packages whose dispatch modes change no results


class TorchModes(NamedTuple):
    """The function and dispatch modes of a thread, the outermost first."""

    function: tuple[TorchFunctionMode, ...] = ()
    dispatch: tuple[TorchDispatchMode, ...] = ()

    @classmethod
    def capture(cls) -> TorchModes:
        """Those of the calling thread, without the default device, which any thread can enter."""
        depth = torch._C._len_torch_function_stack()
        if depth == 0 and torch._C._len_torch_dispatch_stack() == 0:
            return _NONE
        found = (torch._C._get_function_stack_at(k) for k in range(depth))
        return cls(
            tuple(mode for mode in found if not isinstance(mode, DeviceContext)),
            tuple(dispatch._get_current_dispatch_mode_stack()),
        )

    def __bool__(self) -> bool:
        return bool(self.function or self.dispatch)

    def entered(self) -> Manager:
        """Activate those that the calling thread lacks, if they may change what is computed."""
        return Lazily(self._missing)

    def _missing(self) -> Iterator[Manager]:
        now = TorchModes.capture()
        for mode in self.function:
            if mode not in now.function:
                yield _Pushed(mode, overrides._push_mode, overrides._pop_mode)
        for each in self.dispatch:
            if each not in now.dispatch and not type(each).__module__.startswith(_OBSERVERS):
                yield _Pushed(each, dispatch._push_mode, dispatch._pop_mode)


_NONE = TorchModes()


class _Pushed:
    """Pushes a mode for the duration of a ``with`` block, without calling its ``__enter__``.

    That is for the user to call: it may reset what the mode has counted.
    """

    def __init__(self, mode: Any, push: Callable[[Any], object], pop: Callable[[], object]) -> None:
        self._mode, self._push, self._pop = mode, push, pop

    def __enter__(self) -> None:
        self._push(self._mode)

    def __exit__(self, *error: object) -> None:
        self._pop()


class ThreadState(NamedTuple):
    """What a run on the thread changes; to restore after an interrupt.

    Attributes:
        function: The number of function modes.
        dispatch: The number of dispatch modes.
        grad: Whether gradients are recorded.
        intra_op: How many threads operators use.
    """

    function: int
    dispatch: int
    grad: bool
    intra_op: int

    @classmethod
    def capture(cls) -> ThreadState:
        """The state of the calling thread."""
        return cls(
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )

    def restore(self) -> None:
        """Exit the modes that were entered since, and set the others.

        There are none but after an interrupt just before a ``with`` block exits.
        """
        while torch._C._len_torch_dispatch_stack() > self.dispatch:
            mode = dispatch._get_current_dispatch_mode_stack()[-1]
            if type(mode).__module__.startswith(__package__):
                mode.__exit__(None, None, None)
            else:
                dispatch._pop_mode()
        while torch._C._len_torch_function_stack() > self.function:
            overrides._pop_mode()
        if torch.is_grad_enabled() != self.grad:
            torch._C._set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.intra_op:
            torch.set_num_threads(self.intra_op)


def refuse_function_transforms() -> None:
    """Raise inside of ``torch.func`` transforms and forward-mode differentiation.

    Raises:
        RuntimeError: Their state is thread-local, so workers would compute without it.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or forward_ad._current_level >= 0:
        raise RuntimeError(
            "a pipeline must not run inside of torch.func (grad, vmap, jvp) or forward-mode "
            "differentiation, which do not reach its workers. Use the plain nn.Sequential there."
        )


def refuse_cached_parametrizations() -> None:
    """Raise inside of ``torch.nn.utils.parametrize.cached()``.

    Raises:
        RuntimeError: The cached weights belong to the graph of one micro-batch.
    """
    if parametrize._cache_enabled:
        raise RuntimeError(
            "a pipeline must not run inside of torch.nn.utils.parametrize.cached(), which keeps "
            "the weights that one micro-batch has computed for all others. Leave it out."
        )
