"""Wraps the forward of a module that holds the blocks, to notice when it begins and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from lightning_gpipe.core.faithful import is_traced, not_compiled
from lightning_gpipe.core.frontends.install import check_recordable

Around = Callable[[Callable[[], Any]], Any]


class OwnerForward:
    """The forward of a module that holds the blocks.

    A call of it calls ``around`` with a function that runs the forward.
    """

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")  # one assigned to the object
        self._around = around
        # With its signature, which libraries read.
        functools.update_wrapper(self, module.forward, updated=())

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced((args, kwargs), self._module.parameters()):
            check_recordable(self._module)
            return self._run(*args, **kwargs)
        return self._around(lambda: self._run(*args, **kwargs))

    @property
    def __code__(self) -> CodeType:
        """The code of the forward, which torch.export reads."""
        code: CodeType = getattr(self._own or type(self._module).forward, "__code__")  # noqa: B009
        return code

    def install(self) -> None:
        """Have calls of the module come here."""
        self._module.__dict__["forward"] = self

    def remove(self) -> None:
        """Undo :meth:`install`, whatever was installed since."""
        outer = self._module.__dict__.get("forward")
        if outer is not self:
            while isinstance(outer, OwnerForward) and outer._own is not self:
                outer = outer._own
            if isinstance(outer, OwnerForward):
                outer._own = self._own
        elif self._own is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or deep copy of the module runs as the plain module. When this getattr runs, the
        # copy has no instance attributes yet, so it returns the forward of the class.
        if self._own is None:
            return getattr, (self._module, "forward")
        return _identity, (self._own,)


def _identity(forward: Any) -> Any:
    return forward
