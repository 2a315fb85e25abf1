"""The front-end for an nn.ModuleList that the forward of the user's model loops over.

While it is installed, the call of a block is recorded and answered with a placeholder. The call of
the last block runs all of them as a pipeline, and returns what it returned::

    for block in self.blocks:            # recorded: %1 <- stage 0: blocks.0(%0)
        x = block(x)                     #           %2 <- stage 0: blocks.1(%1)
                                         #           %3 <- stage 1: blocks.2(%2), and run

What the forward does with placeholders between two blocks is recorded too, and runs in the stage of
the block before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from typing_extensions import override

from lightning_gpipe.core.faithful import Manager
from lightning_gpipe.core.frontends.frontend import Frontend, OwnerProcesses, RunProgram
from lightning_gpipe.core.frontends.install import OwnerForward, second_pipeline
from lightning_gpipe.core.frontends.module_list.blocks import RUNNING, Block, is_installed, running
from lightning_gpipe.core.frontends.module_list.forwards import BlockCalls
from lightning_gpipe.core.layout import Partition, check_balance, check_distinct, partitions_of


class Loop(Frontend):
    """Makes programs of the loop over the nn.ModuleList at ``path``; raises if it cannot be cut."""

    variables = (RUNNING,)

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__(model)
        if not path:
            raise TypeError(
                "module must be an nn.Sequential, or a model whose forward calls its blocks: got "
                f"{type(model).__qualname__}, which has no forward. Give the model that loops over "
                "it, and where it is there, as in GPipe(model, balance, module='layers')."
            )
        self._title = f"module={path!r}"
        module = model.get_submodule(path)
        _check_blocks(module, self._title)
        self._names = [f"{path}.{key}" for key in module._modules]
        self._modules = [child for child in module._modules.values() if child is not None]
        names = path.split(".")
        self._owners = [model.get_submodule(".".join(names[:k])) for k in range(len(names))]
        self._partitions: list[Partition] = []
        self._blocks: list[Block] = []
        self._forwards: list[OwnerForward] = []
        self._calls: BlockCalls | None = None

    @property
    @override
    def owner(self) -> nn.Module:
        return self._owners[-1]

    @property
    @override
    def units(self) -> Sequence[str]:
        return self._names

    @property
    @override
    def unit_modules(self) -> Iterable[nn.Module]:
        return self._modules

    @override
    def partitions(self, balance: Sequence[int]) -> list[Partition]:
        check_balance(balance, len(self._modules), self._title)
        self._partitions = self._placed(partitions_of(self._modules, self._names, balance))
        return self._partitions

    @override
    def install(self, run: RunProgram, processes: OwnerProcesses | None = None) -> None:
        assert self._partitions, "partitions() comes before install()"
        for name, module in zip(self._names, self._modules, strict=True):
            if is_installed(module):
                raise second_pipeline(name)
        devices = _devices(self._partitions, processes)
        self._blocks = [
            Block(module, k, self._names[k], partition.index, device)
            for partition, device in zip(self._partitions, devices, strict=True)
            for k, module in zip(partition.indices, partition.layers, strict=True)
        ]
        n = self._n or len(self._partitions)
        self._calls = calls = BlockCalls(self._blocks, self._owners, self._title, n, run, processes)
        for block in self._blocks:
            block.install(calls.block)
        self._forwards = [
            OwnerForward(module, partial(calls.forward, module)) for module in self._owners
        ]
        for forward in self._forwards:
            forward.install()

    @override
    def running(self) -> Manager:
        return running()

    @override
    def remove(self) -> None:
        for forward in self._forwards:
            forward.remove()
        for block in self._blocks:
            block.remove()
        self._forwards, self._blocks = [], []

    @override
    def plain(self) -> AbstractContextManager[None]:
        return nullcontext() if self._calls is None else self._calls.plain()


def _devices(
    partitions: Sequence[Partition], processes: OwnerProcesses | None
) -> list[torch.device | None]:
    """The device of each stage: of a parameter or buffer that it does not share, if it has one.

    A stage of another process has the device of the modules around the stages.
    """
    stages = Counter(parameter for part in partitions for parameter in part.parameters)
    devices: list[torch.device | None] = []
    for partition in partitions:
        if processes is not None and partition.index not in processes.layout.stages_here:
            devices.append(processes.layout.outside)
            continue
        own = (x for x in partition.parameters if stages[x] == 1)
        buffers = (x for layer in partition.layers for x in layer.buffers())
        tensors = [*own, *buffers, *partition.parameters]
        found = next((x.device for x in tensors if not x.is_meta), None)
        if tensors and found is None and processes is not None:  # it shares all with others
            found = processes.layout.device_of(partition.index)
        devices.append(found)
    return devices


def _check_blocks(module: nn.Module, name: str) -> None:
    if not isinstance(module, nn.ModuleList):
        raise TypeError(
            f"{name} must be an nn.ModuleList that a forward loops over: got "
            f"{type(module).__qualname__}."
        )
    for k, block in enumerate(module):
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise TypeError(
                f"{name} must hold modules that are called: got a {type(block).__name__} at index "
                f"{k}. Choose one of those within it."
            )
    check_distinct(module, name, "block")
