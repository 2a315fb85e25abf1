"""Runs a forward so that the numbers that it draws do not depend on the timing of threads.

See Note [Drawing from private generators]. Whether a model draws is recorded for each training mode
of its modules, in the first mini-batch, which always runs with private generators.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import Buffers, SharedGenerators, TrainingFlags

Outputs = list[FlatTree]
Forward = Callable[[SharedGenerators | None], tuple[Outputs, bool]]

_CAPACITY = 64  # training modes; the least recently used are dropped, and recorded again if needed

# Before about torch 2.9, a function given to torch.compile is never compiled once it has run in a
# dispatch mode. There a model is assumed to draw nothing until it does.
_ASSUMED = None if hasattr(TorchDispatchMode, "ignore_compile_internals") else False


class Draws:
    """Records whether a pipeline draws random numbers, and redirects its draws.

    Args:
        devices: The device of each worker.

    Attributes:
        shared: The devices whose generator several workers may draw from.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        shared = {device for device, workers in Counter(devices).items() if workers > 1}
        several = len(devices) > 1
        self.shared = frozenset({torch.device("cpu"), *shared} if several else ())
        self._recorded: OrderedDict[TrainingFlags, bool | None] = OrderedDict()

    def run(
        self,
        flags: TrainingFlags,
        forward: Forward,
        *,
        buffers: Callable[[], Iterable[Buffers]] | None,
        modes: bool,
    ) -> Outputs:
        """Run ``forward``, and run it again if it draws although it did not before.

        Args:
            flags: The training flags of all modules.
            forward: Runs the stages, with private generators if it is given the shared ones;
                returns the outputs, and whether anything was drawn from private generators.
            buffers: Takes a snapshot of the buffers that forward may change, to run it again; None
                if nothing will be recomputed. The stages guard the inputs themselves.
            modes: Whether the caller has active function or dispatch modes: one more costs little
                then, and a counter must not see the forward twice.
        """
        if not self.shared:
            return forward(None)[0]
        shared = SharedGenerators(self.shared)
        draws = self._recorded.get(flags, _ASSUMED)
        if draws is False and not modes:
            return self._run_bare(flags, forward, shared, buffers)
        outputs, drew = forward(shared)
        self._record(flags, draws or drew)
        if drew:
            shared.advance()
        return outputs

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Discard at the end of a ``with`` block what was recorded in it."""
        recorded = self._recorded.copy()
        try:
            yield
        finally:
            self._recorded = recorded

    def _run_bare(
        self,
        flags: TrainingFlags,
        forward: Forward,
        shared: SharedGenerators,
        buffers: Callable[[], Iterable[Buffers]] | None,
    ) -> Outputs:
        """Run without private generators, and again with them if that drew from the shared ones."""
        before = None if buffers is None else list(buffers())
        outputs, _ = forward(None)
        if not shared.moved():
            return outputs
        shared.rewind()
        if before is None:  # the numbers drawn are valid, but not reproducible
            self._record(flags, None)
        else:
            self._record(flags, True)
            for each in before:
                each.refuse_lost()
                each.restore()
            outputs, _ = forward(shared)
        shared.advance()
        return outputs

    def _record(self, flags: TrainingFlags, draws: bool | None) -> None:
        self._recorded[flags] = draws
        self._recorded.move_to_end(flags)
        if len(self._recorded) > _CAPACITY:
            self._recorded.popitem(last=False)
