"""What of the user's model runs as a pipeline: an nn.Sequential, or what a front-end makes of it.

The type of what is found decides: an nn.Sequential runs its layers one after another; of anything
else a front-end makes programs. Either is cut by a balance, attached to a pipeline, and from then
on a call of the model runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gpipe.core.faithful import NOTHING, is_traced
from lightning_gpipe.core.frontends import (
    Installed,
    check_free,
    check_recordable,
    frontend_of,
    install,
)
from lightning_gpipe.core.pipeline.pipeline import Pipeline
from lightning_gpipe.core.plan import (
    Partition,
    Program,
    check_sequential,
    cut,
    parameter_costs,
    shared_with_outside,
)
from lightning_gpipe.core.profile import change_tensors, walk

# Called with a program (None if layers run one after another) and the input; returns the output.
Seen = Callable[[Program | None, Any], Any]
# Called with what was taken, its program (None if layers run one after another) and the input.
Check = Callable[["Taken", Program | None, Any], None]


class Taken(ABC):
    """What runs as a pipeline.

    Args:
        root: The user's model.
        path: Where it is in the model; empty if it is the model.
        module: It.

    Attributes:
        root, path, module: As given.
        own: Parameters of the module that no layer has.
        runs: How often the pipeline ran.
        check: Called before each run, if given.
    """

    own: tuple[nn.Parameter, ...] = ()

    def __init__(self, root: nn.Module, path: str, module: nn.Module) -> None:
        self.root = root
        self.path = path
        self.module = module
        self.runs = 0
        self.check: Check | None = None
        self._pipeline: Pipeline | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "check": None}

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that it was attached to."""
        assert self._pipeline is not None, "it was attached"
        return self._pipeline

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{type(self.root).__name__}.{self.path}" if self.path else "module"

    @property
    @abstractmethod
    def units(self) -> Sequence[str]:
        """The names of what a balance counts, in order."""

    @abstractmethod
    def costs(self) -> list[int]:
        """The number of parameters of each unit."""

    @abstractmethod
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        """Cut it.

        Raises:
            TypeError, ValueError: If it cannot be cut, or not by this balance.
        """

    def attach(self, pipeline: Pipeline) -> None:
        """Let calls of the model run ``pipeline``, whose stages have the partitions."""
        self._pipeline = pipeline
        self.install()

    @abstractmethod
    def install(self) -> None:
        """Install the pipeline in the model."""

    @abstractmethod
    def release(self) -> None:
        """Let the model run as without a pipeline."""

    def each_alone(self) -> list[Partition]:
        """A partition for each unit."""
        return self.partitions([1] * len(self.units))

    @abstractmethod
    def watched(self, seen: Seen) -> AbstractContextManager[None]:
        """A ``with`` block in which calls of the model call ``seen`` in the place of its units.

        It is cut by :meth:`each_alone`, and has no pipeline yet.
        """

    @abstractmethod
    def plain(self) -> AbstractContextManager[None]:
        """A ``with`` block in which calls of the model run as without a pipeline."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, with its inputs on the device of what is around the pipelines."""
        self.pipeline.reset_patches()
        return self.run(*args, **kwargs)

    def record(self, args: Any) -> Any:
        """Call the model for torch.fx, which has ``args`` for all positional arguments.

        Raises:
            TypeError: If the model may have several.
        """
        raise TypeError(
            "torch.fx must be given a model whose arguments have names: got a GPipe around "
            f"{type(self.root).__name__}. Give it the {type(self.root).__name__} itself, which it "
            "records as without a pipeline."
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the patches of a verification in force."""
        if self.path:
            outside = self.pipeline.layout.outside
            args = tuple([_moved(each, outside) for each in args])
            kwargs = {name: _moved(each, outside) for name, each in kwargs.items()}
        return self.root.forward(*args, **kwargs)


class Layers(Taken):
    """An nn.Sequential, within the model or the model itself."""

    def __init__(self, root: nn.Module, path: str, module: nn.Sequential) -> None:
        super().__init__(root, path, module)
        self.own = tuple(p for p in module._parameters.values() if p is not None)
        self._installed: Installed | None = None

    def by_itself(self) -> Layers:
        """It, as a model of its own; ``own`` has the parameters that the model around it shares."""
        assert isinstance(self.module, nn.Sequential)
        alone = Layers(self.module, "", self.module)
        alone.own = (*alone.own, *shared_with_outside(self.root, self.module))
        return alone

    @property
    @override
    def units(self) -> Sequence[str]:
        prefix = f"{self.path}." if self.path else ""
        return [f"{prefix}{name}" for name in self.module._modules]

    @override
    def costs(self) -> list[int]:
        return parameter_costs(self.module.children())

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        check_free(self.module, self.name)
        check_sequential(self.module, self.name)
        assert isinstance(self.module, nn.Sequential)
        return cut(self.module, balance, self.name)

    @override
    def install(self) -> None:
        if self.path:
            self._installed = install(self.module, self.forward, self.name)

    @override
    def release(self) -> None:
        if self._installed is not None:
            self._installed.remove()

    @contextmanager
    @override
    def watched(self, seen: Seen) -> Iterator[None]:
        installed = install(self.module, partial(seen, None), self.name)
        try:
            yield
        finally:
            installed.remove()

    @contextmanager
    @override
    def plain(self) -> Iterator[None]:
        forward = self.module.__dict__.pop("forward", None)
        try:
            yield
        finally:
            if forward is not None:
                self.module.forward = forward

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return super().call(*args, **kwargs) if self.path else self.forward(*args, **kwargs)

    @override
    def record(self, args: Any) -> Any:
        return super().record(args) if self.path else self.forward(args[0])

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, **kwargs) if self.path else self.run_layers(*args, **kwargs)

    def forward(self, input: Any) -> Any:
        """Run the layers on ``input``; one after another on all of it while it is recorded."""
        pipeline = self.pipeline
        pipeline.reset_patches()
        if not is_traced(input, self.module.parameters()):
            self.runs += 1
            if self.check is not None:
                self.check(self, None, input)
            return self.run_layers(input)
        self._check_layers()
        with pipeline.engine.exclusive():
            return walk(pipeline.stages, input, lambda _, layer, x: layer(x))

    def run_layers(self, input: Any) -> Any:
        """Run the layers on ``input`` in micro-batches."""
        try:
            self._check_layers()
        except RuntimeError as error:
            self.pipeline.tell(error)  # the user's code may catch it
            raise
        return self.pipeline.run(input)

    def _check_layers(self) -> None:
        """Raise if the module has other layers than those that were cut."""
        layers = [layer for p in self.pipeline.layout.partitions for layer in p.layers]
        modules = self.module._modules
        if len(modules) != len(layers):
            raise RuntimeError(
                f"the layers of a pipeline must stay the same: it was set up for {len(layers)} "
                f"and has {len(modules)} now. Add or remove layers before setup."
            )
        for layer, (name, found) in zip(layers, modules.items(), strict=True):
            if found is not layer:
                raise RuntimeError(
                    f"the layers of a pipeline must stay the same objects: layer {name!r} was "
                    f"{type(layer).__name__} when it was set up and is another "
                    f"{type(found).__name__} now. Replace layers before setup."
                )


class Programs(Taken):
    """What a front-end makes programs of."""

    @property
    def owner(self) -> nn.Module:
        """The module whose forward the programs are made of."""
        return self._frontend.owner

    def __init__(self, root: nn.Module, path: str, module: nn.Module) -> None:
        super().__init__(root, path, module)
        self._frontend = frontend_of(root, path, module)

    def __getstate__(self) -> dict[str, Any]:
        # A front-end knows one model; a copy of the model has one of its own.
        return {**super().__getstate__(), "_frontend": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._frontend = frontend_of(self.root, self.path, self.module)

    def _run_program(
        self, program: Program, values: Sequence[Any], *, chunks: int | None = None
    ) -> list[Any]:
        self.runs += 1
        if self.check is not None:
            self.check(self, program, values)
        return self.pipeline.run_program(program, values, chunks=chunks)

    @property
    @override
    def units(self) -> Sequence[str]:
        return self._frontend.units

    @override
    def costs(self) -> list[int]:
        return self._frontend.costs()

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        return self._frontend.partitions(balance)

    @override
    def install(self) -> None:
        processes = self.pipeline if self.pipeline.layout.spread else None
        self._frontend.install(self._run_program, processes)

    @override
    def release(self) -> None:
        self._frontend.remove()

    @contextmanager
    @override
    def watched(self, seen: Seen) -> Iterator[None]:
        def run(program: Program, values: Sequence[Any], *, chunks: int | None = None) -> list[Any]:
            found: list[Any] = seen(program, values)
            return found

        self._frontend.install(run)
        try:
            yield
        finally:
            self._frontend.remove()

    @override
    def plain(self) -> AbstractContextManager[None]:
        return self._frontend.plain()

    @override
    def run(self, *args: Any, **kwargs: Any) -> Any:
        recorded = is_traced((args, kwargs), self.root.parameters())
        if recorded:
            check_recordable(self.root)
        with self.plain() if recorded else NOTHING:
            return super().run(*args, **kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    """An argument with its tensors on a device."""
    if type(value) is Tensor and value.device == device:
        return value  # most often
    return change_tensors(value, lambda x: x.to(device))


@contextmanager
def checked(found: Sequence[Taken], check: Check) -> Iterator[None]:
    """A ``with`` block in which ``check`` is called before each run of a pipeline."""
    before = [taken.check for taken in found]
    try:
        for taken in found:
            taken.check = check
        yield
    finally:
        for taken, each in zip(found, before, strict=True):
            taken.check = each
