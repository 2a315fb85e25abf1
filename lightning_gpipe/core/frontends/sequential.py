"""The front-end for an nn.Sequential: its layers, those of nested ones too, one after another."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from lightning_gpipe.core.frontends.frontend import Frontend, OwnerProcesses, RunProgram
from lightning_gpipe.core.frontends.install import check_free, install
from lightning_gpipe.core.layout import (
    Partition,
    balance_of_layers,
    cut,
    groups_of,
    has_own_forward,
    hooks_of,
    layers_of,
)
from lightning_gpipe.core.programs import Program, chain


class Layers(Frontend):
    """Runs the layers of the nn.Sequential at ``path``: the same program for each call."""

    takes_batch = True
    _module: nn.Sequential
    _program: Program

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__(model, path)
        self._name = f"{type(model).__name__}.{path}" if path else "module"
        self._processes: OwnerProcesses | None = None

    @property
    @override
    def own(self) -> Sequence[nn.Parameter]:
        return [each for each in self._module._parameters.values() if each is not None]

    @property
    @override
    def units(self) -> Sequence[str]:
        return [self._prefix + path for path in layers_of(self._module)]

    @property
    @override
    def unit_modules(self) -> Iterable[nn.Module]:
        return layers_of(self._module).values()

    @override
    def in_units(self, balance: Sequence[int]) -> Sequence[int]:
        return balance_of_layers(self._module, balance)

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        check_free(self._module, self._name)
        partitions = cut(self._module, balance, self._name, self._prefix)
        program = chain(zip(x.layers, x.titles, strict=True) for x in partitions)
        self._program = program.moved(self._first, self._n)
        return self._placed(partitions)

    @property
    @override
    def program(self) -> Program:
        return self._program

    @override
    def install(self, run: RunProgram, processes: OwnerProcesses | None = None) -> None:
        # For :meth:`_check_same`.
        self._layers, self._groups = layers_of(self._module), groups_of(self._module)
        containers = [self._module, *self._groups.values()]
        self._children = [(each, tuple(each._modules.values())) for each in containers]
        self._hooks = [hooks for group in self._groups.values() for hooks in hooks_of(group)]
        self._processes = processes
        if self._prefix:
            self._installed = install(self._module, partial(self._forward, run), self._name)

    @override
    def call(self, run: RunProgram, /, *args: Any, **kwargs: Any) -> Any:
        if self._prefix:
            return super().call(run, *args, **kwargs)
        return self._forward(run, *args, **kwargs)

    def _forward(self, run: RunProgram, input: Any, *others: Any, **named: Any) -> Any:
        if others or named:
            raise TypeError(
                f"{self._name} must be called with one argument, as any nn.Sequential: got "
                f"{1 + len(others) + len(named)}. Pass several values as one tuple, which its "
                "first layer gets."
            )
        try:
            self._check_same()
        except RuntimeError as error:
            if self._processes is not None:
                self._processes.tell(error)  # the user's code may catch it
            raise
        [output] = run(self._program, [input])
        return output

    def _check_same(self) -> None:
        """Raise if the module has other layers than those that were cut; each mini-batch asks."""
        for module, children in self._children:
            modules = module._modules.values()
            if len(modules) != len(children) or not all(map(is_, modules, children)):
                self._check_layers()
        if any(self._hooks) or any("forward" in vars(group) for group in self._groups.values()):
            self._check_groups()

    def _check_layers(self) -> None:
        layers = layers_of(self._module)
        if len(layers) != len(self._layers):
            raise RuntimeError(
                "the layers of a pipeline must stay the same: it was set up for "
                f"{len(self._layers)} and has {len(layers)} now. Add or remove layers before setup."
            )
        for before, (path, layer) in zip(self._layers.values(), layers.items(), strict=True):
            if layer is not before:
                raise RuntimeError(
                    f"the layers of a pipeline must stay the same objects: layer {path!r} was "
                    f"{type(before).__name__} when it was set up and is another "
                    f"{type(layer).__name__} now. Replace layers before setup."
                )

    def _check_groups(self) -> None:
        """Refuse what a group got since setup and the pipeline, which never calls it, leaves out.

        Without gradients hooks only warn: a summary of the model registers some for one forward.
        """
        forwards = [path for path, group in self._groups.items() if has_own_forward(group)]
        hooked = [path for path, group in self._groups.items() if any(hooks_of(group))]
        if not forwards and not hooked:
            return
        message = (
            f"the nested Sequentials of {self._name} must stay without a forward and hooks of "
            f"their own, because a pipeline runs their layers one by one: got "
            f"{'a forward' if forwards else 'hooks'} on {', '.join(map(repr, forwards or hooked))} "
            "since setup. Register hooks on a layer, or before setup: such a Sequential is one "
            "layer."
        )
        if forwards or torch.is_grad_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)
