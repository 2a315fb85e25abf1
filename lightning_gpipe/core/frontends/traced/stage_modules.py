"""The partitions of a traced module, and the tensors that their stages read.

A partition has the outermost modules that are wholly of its stage. Parameters and buffers that a
forward reads itself, such as the ``cls_token`` of a vision transformer, belong to modules on
several stages; a stage that reads one has a small module that holds the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from lightning_gpipe.core.frontends.traced.call_graph import CallGraph
from lightning_gpipe.core.frontends.traced.ownership import Ownership
from lightning_gpipe.core.layout import Partition, partitions_of


class TensorHolder(nn.Module):
    """Holds a parameter, or all buffers, of another module."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        if name in owner._parameters:
            self.register_parameter(name, owner._parameters[name])
        else:
            self._buffers = owner._buffers  # what replaces one, such as .to(), does so in both


class StageModules:
    """The modules of each stage, as cut by ``graphs``; the stage of each is added to ``own``."""

    def __init__(self, graphs: Sequence[CallGraph], own: Ownership, prefix: str) -> None:
        self._root = graphs[0].root
        self.own = own
        self._readers = _readers(graphs, own)
        self._modules: list[dict[str, nn.Module]] = [{} for _ in range(own.n)]
        self._place("", self._root)
        for j in range(own.n):
            self._add_borrowed(j)
        self.partitions = self._partitions(graphs, prefix)
        for partition in self.partitions:
            own.owners.update(dict.fromkeys(partition.modules, partition.index))

    def slot(self, path: str, j: int) -> tuple[int, nn.Module, str] | None:
        """Find the latest stage until ``j`` with the tensor at a path, and its module and name."""
        owner, name = _parent(self._root, path)
        for partition in reversed(self.partitions[: j + 1]):
            for module in partition.modules:
                if local := _name_in(module, owner, name):
                    return partition.index, module, local
        return None

    def _place(self, prefix: str, module: nn.Module) -> None:
        stages = self._stages(prefix, module)
        if prefix and len(stages) == 1:
            self._modules[stages.pop()][prefix[:-1]] = module
        elif prefix and not stages:
            if any(True for _ in (*module.parameters(), *module.buffers())):
                self._modules[-1][prefix[:-1]] = module
        else:
            for name, child in module._modules.items():
                placed = (other for modules in self._modules for other in modules.values())
                if child is not None and all(child is not other for other in placed):
                    self._place(f"{prefix}{name}.", child)
            self._hold(prefix, module)

    def _hold(self, prefix: str, module: nn.Module) -> None:
        last = self.own.n - 1
        for name, parameter in module._parameters.items():
            if parameter is not None:
                for j in sorted(self._readers.get(prefix + name, {last})):
                    self._modules[j][prefix + name] = TensorHolder(module, name)
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None]
        if buffers:
            stages = [j for name in buffers for j in self._readers.get(prefix + name, ())]
            first = min(stages, default=last)
            self._modules[first][prefix + buffers[0]] = TensorHolder(module, buffers[0])

    def _stages(self, prefix: str, module: nn.Module) -> set[int]:
        """Return the stages that have a layer in ``module``, or read a tensor of it."""
        owners = self.own.owners
        if module in owners:
            return {owners[module]}
        reading = (stages for path, stages in self._readers.items() if path.startswith(prefix))
        return {owners[m] for m in module.modules() if m in owners}.union(*reading)

    def _add_borrowed(self, j: int) -> None:
        """Add holders of parameters of other stages' modules, such as tied weights."""
        here = {id(p) for module in self._modules[j].values() for p in module.parameters()}
        for path, stages in self._readers.items():
            owner, name = _parent(self._root, path)
            parameter = owner._parameters.get(name)
            if j in stages and parameter is not None and id(parameter) not in here:
                here.add(id(parameter))
                self._modules[j][path] = TensorHolder(owner, name)

    def _partitions(self, graphs: Sequence[CallGraph], prefix: str) -> list[Partition]:
        order = {str(node.target): k for g in reversed(graphs) for k, node in enumerate(g.nodes)}
        used = partial(_first_use, order)
        layers = [(x, modules[x]) for modules in self._modules for x in sorted(modules, key=used)]
        names = [prefix + path for path, _ in layers]
        return partitions_of([layer for _, layer in layers], names, list(map(len, self._modules)))


def _name_in(module: nn.Module, owner: nn.Module, name: str) -> str | None:
    if module._buffers is owner._buffers and name in owner._buffers:
        return name
    parameter = owner._parameters.get(name)
    own = module._parameters.items() if parameter is not None else ()
    return next((key for key, tensor in own if tensor is parameter), None)


def _readers(graphs: Sequence[CallGraph], own: Ownership) -> dict[str, set[int]]:
    readers: dict[str, set[int]] = {}
    for graph in graphs:
        stages = own.stages(graph)
        for node in graph.nodes:
            if node.op == "get_attr":
                used = {stages[user] for user in node.users if user in stages}
                if node in graph.outputs:
                    used.add(own.n - 1)
                readers.setdefault(str(node.target), set()).update(used)
    return {path: stages for path, stages in readers.items() if stages}


def _first_use(order: Mapping[str, int], path: str) -> int:
    inner = f"{path}."
    used = [k for name, k in order.items() if name == path or name.startswith(inner)]
    return min(used, default=len(order))


def _parent(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    outer, _, name = path.rpartition(".")
    return root.get_submodule(outer), name
