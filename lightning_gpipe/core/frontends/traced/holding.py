"""The partitions of a traced module, and where the stages find the parameters that steps read.

A partition has the outermost modules that are wholly of its stage. Parameters and buffers that a
forward reads itself, such as the ``cls_token`` of a vision transformer, belong to modules that are
on several stages. So a stage that reads one has a small module that holds the same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_gpipe.core.frontends.traced.graph import Graph
from lightning_gpipe.core.frontends.traced.ownership import Ownership
from lightning_gpipe.core.plan import Partition


class Holder(nn.Module):
    """Holds a parameter, or the buffers, of another module; called, it returns the one it is for.

    Args:
        owner: The user's module.
        name: The name of the tensor in it.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self._name = name
        if name in owner._parameters:
            self.register_parameter(name, owner._parameters[name])
        else:
            self._buffers = owner._buffers  # what replaces one, such as .to(), does so in both

    @override
    def forward(self) -> Any:
        return getattr(self, self._name)


@dataclass(frozen=True)
class Slot:
    """Where a stage finds a tensor."""

    module: nn.Module
    name: str

    def __call__(self) -> Any:
        """The tensor as it is now."""
        return getattr(self.module, self.name)


class Held:
    """What the stages hold.

    Args:
        graphs: The graphs by which the stages were cut.
        own: Which stage has which layer; learns it of all modules of the stages.
        prefix: What the names of the layers begin with, in the user's model.

    Attributes:
        partitions: The partition of each stage.
    """

    def __init__(self, graphs: Sequence[Graph], own: Ownership, prefix: str = "") -> None:
        self._root = graphs[0].root
        self._prefix = prefix
        self._own = own
        self._reading = _readers(graphs, own)
        self._found: list[list[tuple[str, nn.Module]]] = [[] for _ in range(own.n)]
        self._place("", self._root)
        self.partitions = self._partitions(graphs)
        for partition in self.partitions:
            for layer in partition.layers:
                own.owners.update(dict.fromkeys(layer.modules(), partition.index))

    def slot(self, path: str, j: int) -> tuple[int, Slot] | None:
        """The latest stage until ``j`` that holds the parameter or buffer at a path, and where."""
        owner, name = _parent(self._root, path)
        for partition in reversed(self.partitions[: j + 1]):
            for layer in partition.layers:
                for module in layer.modules():
                    if found := _name_in(module, owner, name):
                        return partition.index, Slot(module, found)
        return None

    def _place(self, path: str, module: nn.Module) -> None:
        """Put a module, or what is in it, on the stages that need it."""
        stages = self._stages(path, module)
        if path and len(stages) == 1:
            self._found[stages.pop()].append((path, module))
            return
        if path and not stages:
            if any(True for _ in (*module.parameters(), *module.buffers())):
                self._found[-1].append((path, module))
            return
        for name, child in module._modules.items():
            if child is not None and all(child is not each for _, each in self._all()):
                self._place(f"{path}.{name}" if path else name, child)
        self._hold(path, module)

    def _hold(self, path: str, module: nn.Module) -> None:
        """Make holders of the tensors of a module that is on several stages."""
        last = self._own.n - 1
        inner = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                for j in sorted(self._reading.get(f"{inner}{name}", {last})):
                    self._found[j].append((f"{inner}{name}", Holder(module, name)))
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
        if buffers:
            stages = [j for name in buffers for j in self._reading.get(f"{inner}{name}", ())]
            first = min(stages, default=last)
            self._found[first].append((f"{inner}{buffers[0]}", Holder(module, buffers[0])))

    def _stages(self, path: str, module: nn.Module) -> set[int]:
        """The stages that have a layer in ``module``, or read a tensor of it."""
        if module in self._own.owners:
            return {self._own.owners[module]}
        found = {self._own.owners[each] for each in module.modules() if each in self._own.owners}
        inner = f"{path}." if path else ""
        for name, stages in self._reading.items():
            if name.startswith(inner):
                found |= stages
        return found

    def _all(self) -> Iterator[tuple[str, nn.Module]]:
        return (each for found in self._found for each in found)

    def _partitions(self, graphs: Sequence[Graph]) -> list[Partition]:
        first, partitions = 0, []
        order = {str(node.target): k for g in reversed(graphs) for k, node in enumerate(g.nodes)}
        for j, found in enumerate(self._found):
            self._add_borrowed(j)
            found.sort(key=lambda each: _position(each[0], order))
            names, layers = zip(*found, strict=True) if found else ((), ())
            partitions.append(
                Partition(j, first, layers, tuple(self._prefix + name for name in names))
            )
            first += len(found)
        return partitions

    def _add_borrowed(self, j: int) -> None:
        """Holders of parameters of other stages' modules, such as tied weights."""
        here = {id(t) for _, layer in self._found[j] for t in layer.parameters()}
        for path, stages in self._reading.items():
            owner, name = _parent(self._root, path)
            if j in stages and name in owner._parameters:
                parameter = owner._parameters[name]
                if id(parameter) not in here:
                    here.add(id(parameter))
                    self._found[j].append((path, Holder(owner, name)))


def _name_in(module: nn.Module, owner: nn.Module, name: str) -> str | None:
    """The name that a tensor of ``owner`` has in ``module``."""
    if module._buffers is owner._buffers and name in owner._buffers:
        return name
    parameter = owner._parameters.get(name)
    mine = module._parameters.items() if parameter is not None else ()
    return next((k for k, each in mine if each is parameter), None)


def _readers(graphs: Sequence[Graph], own: Ownership) -> dict[str, set[int]]:
    """For each parameter or buffer that steps read, by its path, the stages of these steps."""
    found: dict[str, set[int]] = {}
    for graph in graphs:
        stages = own.stages(graph)
        for node in graph.nodes:
            if node.op == "get_attr":
                used = {stages[user] for user in node.users if user in stages}
                if node in graph.outputs:
                    used.add(own.n - 1)
                found.setdefault(str(node.target), set()).update(used)
    return {path: stages for path, stages in found.items() if stages}


def _position(path: str, order: Mapping[str, int]) -> int:
    """Where in the graph something at a path, or in it, is first used."""
    inner = f"{path}."
    used = [k for each, k in order.items() if each == path or each.startswith(inner)]
    return min(used, default=len(order))


def _parent(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    outer, _, name = path.rpartition(".")
    return root.get_submodule(outer), name
