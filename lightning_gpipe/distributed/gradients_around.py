"""Gradients of the parameters around a pipeline, where each process runs a part of the user's step.

With outputs for the last stage, the gradient of an embedding is in the process of the first stage,
that of a head in that of the last, and a tied weight has a part of its gradient in each.

To send around all of them in each step would be slow, so parameters live where they are used. The
process of the last stage has all of them, for it runs the whole step. That of the first stage has
those that the step uses before its call. Both step these; the others have them on the meta device.
The first gradient of a parameter shows where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_gpipe.distributed.group import Group, in_messages
from lightning_gpipe.distributed.shares import Shares

_WHAT = "the gradients around the pipeline"


class Home(Enum):
    """The processes of a pipeline that have a parameter."""

    LAST = auto()  # that of the last stage
    ENDS = auto()  # that of the first stage, too
    ALL = auto()


class GradientsAround:
    """Gives each parameter around a pipeline its gradient, in the processes that have it.

    Args:
        pipeline: The processes of the pipeline, whose first one has its last stage.
        everyone: Those of all pipelines.
        across: The processes with this one's place in all pipelines; None if there is one.
        first: The place of the process of the first stage.
        shared: The ids of parameters that code of any process may use: all keep them.
        shares: The owners of the parameters among the pipelines, if only these have gradients.
        alone: Whether only the processes of the first and the last stage run the user's step.
    """

    def __init__(
        self,
        around: Sequence[nn.Parameter],
        pipeline: Group,
        everyone: Group,
        across: ProcessGroup | None,
        first: int,
        shared: Collection[int],
        *,
        alone: bool,
        shares: Shares | None,
    ) -> None:
        self.homes: dict[int, Home] = {}  # by the ids of parameters, once they are known
        self._around = around
        self._pipeline, self._everyone, self._across = pipeline, everyone, across
        self._first = first
        self._shared, self._alone, self._shares = shared, alone, shares
        self._replicas = everyone.size // pipeline.size
        self._totals: dict[int, Tensor] = {}  # of the steps before, by the ids of the parameters
        self._earlier: dict[int, Tensor] = {}  # those that the present step adds to
        self._send(torch.zeros(1), first, 0)  # which connects them

    def begin(self) -> None:
        """Set gradients aside to which a backward would add, and which are whole already."""
        for parameter in self._around:
            if parameter.grad is not None and parameter.grad is self._totals.get(id(parameter)):
                self._earlier[id(parameter)], parameter.grad = parameter.grad, None

    @property
    def at_ends(self) -> list[nn.Parameter]:
        """The parameters that code before a call may use, and only processes of both ends have."""
        # If one process has both ends, it does not show where it uses a parameter.
        homes = (Home.LAST, Home.ENDS) if self._first == 0 else (Home.ENDS,)
        return [x for x in self._around if self.homes.get(id(x)) in homes]

    def add_up(self, *, called: bool, alone: bool) -> list[nn.Parameter]:
        """Give the processes that have a parameter its sum over these, averaged over pipelines.

        Args:
            called: Whether the step has called the pipeline: else the code before a call has no
                part in it.
            alone: Whether only the processes of both ends need to run such a step.

        Returns:
            The parameters that this process does not use, and must drop.
        """
        rank, first = self._pipeline.rank, self._first
        parts = torch.zeros(3, len(self._around), dtype=torch.int64)
        own = 0 if rank == 0 else 1 if rank == first else 2
        parts[own] = torch.tensor([int(p.grad is not None) for p in self._around])
        some = self._everyone.sum(parts, f"the number of {_WHAT}").T.tolist()
        used: dict[tuple[Home, bool, torch.dtype], list[nn.Parameter]] = {}
        dropped = []
        for parameter, (at_last, at_first, elsewhere) in zip(self._around, some, strict=True):
            if not (at_last or at_first or elsewhere):
                continue
            home = self.homes.get(id(parameter), Home.ALL)
            if called and id(parameter) not in self.homes:
                alone = alone and self._alone
                home = self._home_of(parameter, bool(at_first), bool(elsewhere), alone=alone)
                self.homes[id(parameter)] = home
                if not self._has(home):
                    dropped.append(parameter)
            parts_at_both = bool(at_last) or self._replicas > 1
            used.setdefault((home, parts_at_both, parameter.dtype), []).append(parameter)
        for (home, both, _), parameters in used.items():
            for together in in_messages(parameters):
                self._add(home, together, both=both)
        for parameter in self._around:
            if (earlier := self._earlier.pop(id(parameter), None)) is not None:
                parameter.grad = earlier
        return dropped

    def _home_of(
        self, parameter: nn.Parameter, at_first: bool, elsewhere: bool, *, alone: bool
    ) -> Home:
        before = at_first or self._first == 0  # perhaps it is used before the call
        if id(parameter) in self._shared or elsewhere or (before and not alone):
            return Home.ALL
        return Home.ENDS if at_first else Home.LAST

    def _has(self, home: Home) -> bool:
        places = {Home.LAST: {0}, Home.ENDS: {0, self._first}}
        return home is Home.ALL or self._pipeline.rank in places[home]

    def _add(self, home: Home, parameters: Sequence[nn.Parameter], *, both: bool) -> None:
        """Add up gradients of one dtype; with ``both``, the first stage's process lacks some."""
        if home is Home.ALL:
            flat = self._everyone.sum(_flat(parameters), _WHAT)
            self._write(parameters, flat / self._replicas)
        elif self._pipeline.rank == 0:
            self._add_at_last(home, parameters, both=both)
        elif self._pipeline.rank == self._first and home is Home.ENDS:
            flat = _flat(parameters)
            self._send(flat, self._first, 0)
            if both:
                self._send(flat, 0, self._first)
            self._write(parameters, flat)

    def _add_at_last(self, home: Home, parameters: Sequence[nn.Parameter], *, both: bool) -> None:
        if home is Home.LAST and self._across is None:
            return  # they are whole
        if home is Home.LAST:
            flat = _flat(parameters)
        else:
            flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
            self._send(flat, self._first, 0)
            if any(p.grad is not None for p in parameters):
                flat += _flat(parameters)
        if self._across is not None:
            device = parameters[0].device
            on_device = flat.to(device)
            with self._pipeline.explaining(_WHAT):
                dist.all_reduce(on_device, group=self._across)
            flat = on_device.cpu() / self._replicas
        if home is Home.ENDS and both:
            self._send(flat, 0, self._first)
        self._write(parameters, flat)

    def _send(self, tensor: Tensor, source: int, target: int) -> None:
        self._pipeline.move(tensor, source, target, _WHAT)

    def _write(self, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        sums = flat.split([p.numel() for p in parameters])
        for parameter, total in zip(parameters, sums, strict=True):
            if self._shares is not None and not self._shares.is_own(parameter):
                parameter.grad = None
                continue
            several = len(parameters) > 1  # whose gradients must not share memory
            gradient = total.view(parameter.shape).to(parameter.device, copy=several)
            earlier = self._earlier.pop(id(parameter), None)
            parameter.grad = gradient if earlier is None else earlier + gradient
            self._totals[id(parameter)] = parameter.grad


def _flat(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return gradients on the CPU, one after another, zeros for none; a single one is no copy."""
    some = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    parts = [gradient.detach().cpu().reshape(-1) for gradient in some]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
