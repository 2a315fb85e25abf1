"""PyTorch's function and dispatch modes, which see or change every operation of their thread.

A mode is made for one thread, so while one is active the pipeline runs on the caller's thread. A
recomputation needs those that change results, which may no longer be active in backward. PyTorch's
own dispatch modes are not entered again: they only observe, and a counter that was read after
forward must not continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.faithful.managers import Bracket, LazyManagers, Manager, setting

_OWN = "lightning_gpipe.core.faithful."
_OBSERVERS = ("torch.", "lightning_gpipe.")  # packages whose dispatch modes change no results


class TorchModes(NamedTuple):
    """The function and dispatch modes of a thread, the outermost first."""

    function: tuple[TorchFunctionMode, ...] = ()
    dispatch: tuple[TorchDispatchMode, ...] = ()

    @classmethod
    def capture(cls) -> TorchModes:
        """Capture the calling thread's modes but for the default device, which others can enter."""
        depth = torch._C._len_torch_function_stack()
        if depth == 0 and torch._C._len_torch_dispatch_stack() == 0:
            return _NONE
        functions = (torch._C._get_function_stack_at(k) for k in range(depth))
        return cls(
            tuple(mode for mode in functions if not isinstance(mode, DeviceContext)),
            tuple(dispatch._get_current_dispatch_mode_stack()),
        )

    def __bool__(self) -> bool:
        return bool(self.function or self.dispatch)

    def entered(self) -> Manager:
        """Activate the modes that the calling thread lacks, if they may change results."""
        return LazyManagers(self._missing)

    def _missing(self) -> Iterator[Manager]:
        now = TorchModes.capture()
        for mode in self.function:
            if mode not in now.function:
                yield _pushed(mode, overrides._push_mode, overrides._pop_mode)
        for dispatch_mode in self.dispatch:
            module = type(dispatch_mode).__module__
            if dispatch_mode not in now.dispatch and not module.startswith(_OBSERVERS):
                yield _pushed(dispatch_mode, dispatch._push_mode, dispatch._pop_mode)


_NONE = TorchModes()


def _pushed(mode: Any, push: Callable[[Any], object], pop: Callable[[], object]) -> Manager:
    """Push a mode in a ``with`` block, without its ``__enter__``, which may reset its counters."""
    return Bracket(partial(push, mode), lambda _: pop())


class ThreadState(NamedTuple):
    """The state of a thread that a run on it changes, to restore after an interrupt."""

    function: int  # the number of function modes
    dispatch: int  # the number of dispatch modes
    grad: bool
    intra_op: int  # the number of threads that operators use

    @classmethod
    def capture(cls) -> ThreadState:
        return cls(
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )

    def restore(self) -> None:
        """Exit the modes that an interrupt just before the end of a ``with`` block has left."""
        while torch._C._len_torch_dispatch_stack() > self.dispatch:
            mode = dispatch._get_current_dispatch_mode_stack()[-1]
            if type(mode).__module__.startswith(_OWN):
                mode.__exit__(None, None, None)
            elif getattr(mode, "old_dispatch_mode_flags", ()):
                TorchDispatchMode.__exit__(mode, None, None, None)  # its own might print
            else:  # pushed without being entered
                dispatch._pop_mode()
        while torch._C._len_torch_function_stack() > self.function:
            overrides._pop_mode()
        if torch.is_grad_enabled() != self.grad:
            torch._C._set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.intra_op:
            torch.set_num_threads(self.intra_op)


def intra_op_threads(number: int) -> Manager:
    """Let operators use ``number`` threads, and at least one, in a ``with`` block."""
    return setting(torch.get_num_threads, torch.set_num_threads, max(1, number))


def refuse_unsupported_modes() -> None:
    """Raise inside of ``torch.func`` transforms, forward-mode differentiation and ``cached()``.

    Workers would compute without the first two, which are thread-local. Weights that
    ``torch.nn.utils.parametrize.cached()`` keeps belong to the graph of one micro-batch.
    """
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or forward_ad._current_level >= 0:
        raise RuntimeError(
            "a pipeline must not run inside of torch.func (grad, vmap, jvp) or forward-mode "
            "differentiation, which do not reach its workers. Use the plain nn.Sequential there."
        )
    if parametrize._cache_enabled:
        raise RuntimeError(
            "a pipeline must not run inside of torch.nn.utils.parametrize.cached(), which keeps "
            "the weights that one micro-batch has computed for all others. Leave it out."
        )
