"""Shares of a model's parameters, each of which one replica owns.

The owner steps a parameter, so it alone needs the state of an optimizer. All replicas must name the
same owner without asking: it follows from the order of the parameters and their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Shares:
    """Divides whole parameters among replicas, so that each has about as many on each device.

    The parameters ``around`` are divided first, so that all processes of a pipeline agree on them.
    """

    def __init__(self, group: ProcessGroup, around: Iterable[Tensor]) -> None:
        self.group = group
        self._owner_of: dict[Tensor, int] = {}
        self._totals = [0] * group.size()  # in elements
        self._on_device: dict[torch.device, list[int]] = {}  # of these
        self._kept_on: dict[Tensor, torch.device] = {}
        self.add(around)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Divide those parameters that are new, the largest first, each into the smallest share."""
        new = [x for x in dict.fromkeys(parameters) if x not in self._owner_of and not x.is_meta]
        for parameter in sorted(new, key=torch.numel, reverse=True):
            sizes = self._on_device.setdefault(parameter.device, [0] * len(self._totals))
            owner = min(range(len(sizes)), key=lambda k: (sizes[k], self._totals[k]))
            self._owner_of[parameter] = owner
            for each in (sizes, self._totals):
                each[owner] += parameter.numel()

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Divide parameters of which only the owner keeps the values; all replicas have them now.

        Their former places are known afterwards, too.
        """
        self._kept_on = {parameter: parameter.device for parameter in parameters}
        self.add(self._kept_on)

    def keeps(self, parameter: Tensor) -> bool:
        return parameter in self._kept_on

    def device_of(self, parameter: Tensor) -> torch.device:
        return self._kept_on.get(parameter, parameter.device)

    def owner_of(self, parameter: Tensor) -> int:
        return self._owner_of[parameter]

    def is_own(self, parameter: Tensor) -> bool:
        return self._owner_of[parameter] == self.group.rank()


def counts(group: ProcessGroup, numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers to be added up over the replicas, on the host if the group can do that."""
    host = torch.device("cpu") in group._device_types
    return torch.tensor(numbers, device="cpu" if host else device)


def total(group: ProcessGroup, numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return the sums of numbers over the replicas."""
    sums = counts(group, numbers, device)
    dist.all_reduce(sums, group=group)
    return [int(x) for x in sums.tolist()]
