"""Makes a module run as a pipeline while it stays the same object.

A wrapper would change the keys of its state dict, a replacement would lose its class, hooks and
other methods, and threads stored in it would break ``copy.deepcopy`` and ``torch.save``. So the
module gets an instance attribute ``forward``, which is not copied with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, MethodType
from typing import Any

from torch import nn

from lightning_gpipe.core.faithful import is_traced, not_compiled


class _ReplacedForward:
    """A forward that a module has for a time in place of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = module.__dict__.get("forward")  # one that a user assigned to this object

    @property
    def __code__(self) -> CodeType:
        """The code of the module's own forward, which torch.export reads."""
        code: CodeType = getattr(self._own or type(self._module).forward, "__code__")  # noqa: B009
        return code

    def install(self) -> None:
        self._module.__dict__["forward"] = self

    def remove(self) -> None:
        """Undo :meth:`install`, whatever was installed since."""
        outer = self._module.__dict__.get("forward")
        if outer is not self:
            while isinstance(outer, _ReplacedForward) and outer._own is not self:
                outer = outer._own
            if isinstance(outer, _ReplacedForward):
                outer._own = self._own
        elif self._own is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own is not None:
            return _identity, (self._own,)
        # A pickled or deep copy of the module runs as the plain module. When this getattr runs, the
        # copy has no instance attributes yet, so it returns the forward of the class.
        return getattr, (self._module, "forward")


def _identity(forward: Any) -> Any:
    return forward


class InstalledForward(_ReplacedForward):
    """The forward of a module that runs as a pipeline."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__(module)
        self._run = run

    @not_compiled  # nor is the code of `run` around the pipeline
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class OwnerForward(_ReplacedForward):
    """The forward of a module that holds the blocks: ``around`` gets the module's own forward."""

    def __init__(self, module: nn.Module, around: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__(module)
        self._around = around
        # With its signature, which libraries read.
        functools.update_wrapper(self, module.forward, updated=())

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own or MethodType(type(self._module).forward, self._module)
        if is_traced((args, kwargs), self._module.parameters()):
            check_recordable(self._module)
            return own(*args, **kwargs)
        return self._around(lambda: own(*args, **kwargs))


def install(module: nn.Module, run: Callable[..., Any], name: str = "module") -> InstalledForward:
    """Make ``module`` call ``run`` instead of its forward; errors call it ``name``."""
    check_free(module, name)
    installed = InstalledForward(module, run)
    installed.install()
    return installed


@contextmanager
def own_forward_of(module: nn.Module) -> Iterator[None]:
    """Let a module run its own forward in a ``with`` block, whatever is installed in it."""
    installed = module.__dict__.get("forward")
    if not isinstance(installed, InstalledForward):
        yield
        return
    installed.remove()
    try:
        yield
    finally:
        installed.install()


def is_installed(module: nn.Module) -> bool:
    """Return whether the module runs as a pipeline."""
    return isinstance(module.__dict__.get("forward"), InstalledForward)


def check_recordable(module: nn.Module) -> None:
    """Refuse to record a module as it is if its layers are on several devices."""
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) > 1:
        raise RuntimeError(
            f"what records {type(module).__name__}, such as torch.export, runs its forward without "
            f"the pipeline, so all of it must be on one device: got {devices}. Record a copy: "
            "copy.deepcopy(model).to(device)."
        )


def check_free(module: nn.Module, name: str = "module") -> None:
    """Refuse a module that runs as a pipeline already."""
    if is_installed(module):
        raise second_pipeline(name)


def second_pipeline(name: str) -> RuntimeError:
    """Return the error for a module that runs in a pipeline already."""
    return RuntimeError(
        f"a module has one pipeline at a time: {name} is in another one, of another Trainer whose "
        "fit or evaluation has not ended, or of a module around or within it. Evaluate in that "
        "Trainer's own loop, or give this one copy.deepcopy(model)."
    )
