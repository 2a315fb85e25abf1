"""The home of complete gradients of stages.

Usually they stay: the mini-batch's autograd node passes them to the parameters. A home may be
further away: the average over replicas, a shard of it in each, the memory of the host. The last
stage's gradients are complete while others still run backward, so an action of its own, G, sends
them home beside the rest of the schedule. The node waits for them: each parameter gets one
gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from torch import Tensor, nn

from lightning_gpipe.core.data import shard_of
from lightning_gpipe.core.faithful import has_memory
from lightning_gpipe.core.layout import Layout
from lightning_gpipe.core.run.backward.sums import Pair


class GradientTransfer(ABC):
    """Sends the gradients of one mini-batch home, and returns those that come back."""

    @abstractmethod
    def send(self, j: int, pairs: list[Pair]) -> list[Pair]:
        """Take stage ``j``'s gradients, on its worker; return those with no home but ``.grad``."""

    @abstractmethod
    def open(self, outside: Collection[int] = (), factor: Tensor | None = None) -> None:
        """Let the gradients leave, from now on, multiplied by ``factor``.

        The leaves with ids ``outside`` get gradients from the caller's code too.
        """

    @abstractmethod
    def receive(self) -> list[Pair]:
        """Wait, and return the leaves whose gradients were taken, with what to add to ``.grad``."""


class GradientHome(ABC):
    """The home of the gradients of an engine's stages."""

    @abstractmethod
    def begin(self) -> GradientTransfer | None:
        """Return the transfer of a mini-batch that begins its backwards; None if they stay here."""


def own_parameters(
    root: nn.Module, layout: Layout, *, frozen: bool = False
) -> dict[int, list[nn.Parameter]]:
    """Return the parameters of each stage of this process that no other module of a model has.

    Those that need dense gradients: for others DistributedDataParallel is told by their modules.
    With ``frozen`` also those that need none.
    """
    stage_of = {
        module: partition.index for partition in layout.partitions for module in partition.modules
    }
    users: dict[int, set[int | None]] = {}
    for module in dict.fromkeys([*root.modules(), *stage_of]):
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(None if sparse else stage_of.get(module))
    return {
        j: [
            parameter
            for parameter in layout.partitions[j].parameters
            if (parameter.requires_grad or frozen)
            and has_memory(shard_of(parameter))
            and users[id(parameter)] == {j}
        ]
        for j in layout.stages_here
    }
