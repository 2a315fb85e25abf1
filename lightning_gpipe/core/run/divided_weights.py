"""Weights of stages that replicas have divided among them: each keeps the values of a share.

Another replica has a parameter of that share without values, as it has those of other stages. It
gets them for the time in which a stage runs, by a collective in which all replicas take part.

# Note [The same gathers in all replicas]
The workers of a process run beside one another, so each gathers in a group of its own, in the order
of its row. Rows differ if a replica has fewer micro-batches, or runs something else. So before a
phase replicas compare their rows. Where these differ, all weights come before the phase and leave
after it: that is the same in all replicas, whatever they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from lightning_gpipe.core.run.backward.sums import Pair


class DividedWeights(ABC):
    """The weights of an engine's stages, divided among replicas."""

    @abstractmethod
    def gather(self, j: int, leaves: Mapping[int, nn.Parameter]) -> Callable[[], None]:
        """Begin to gather the weights of stage ``j``; the result waits until they are here.

        ``leaves`` stand for weights of other replicas, by the ids of these, and get memory at once.
        """

    @abstractmethod
    def agree(self, worker: int, number: int) -> bool:
        """Return True if the same worker of each replica has the same number."""


def with_values(pairs: Iterable[Pair], *, written: bool) -> list[Pair]:
    """Return the gradients of weights with values here; raise if autograd is to write others."""
    pairs = list(pairs)
    here = [pair for pair in pairs if not pair[0].is_meta]
    if written and len(here) < len(pairs):
        raise RuntimeError(
            "gradients of weights that replicas have divided must go to the replica that keeps the "
            "weight, in a backward of the Trainer's: got another backward. With manual "
            "optimization write self.manual_backward(loss), not loss.backward()."
        )
    return here
