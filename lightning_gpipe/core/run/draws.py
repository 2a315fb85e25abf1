"""Runs a forward so that what it draws depends on no timing of threads.

See Note [Drawing from private generators]. Whether a model draws is known for a training mode of
all its modules: after the first mini-batch, which runs with private generators whatever it does.
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

_KNOWN = 64  # training modes; what is forgotten is learnt again

# Before torch 2.9 or so, what torch.compile has compiled never is once it has run in a dispatch
# mode: there a model is taken to draw nothing until it does.
_AT_FIRST = None if hasattr(TorchDispatchMode, "ignore_compile_internals") else False


class Draws:
    """Whether a pipeline draws random numbers, as far as it is known.

    Args:
        devices: The device of each worker.

    Attributes:
        shared: The devices whose generator several workers may draw from.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        crowded = {device for device, workers in Counter(devices).items() if workers > 1}
        several = len(devices) > 1
        self.shared = frozenset({torch.device("cpu"), *crowded} if several else ())
        self._known: OrderedDict[TrainingFlags, bool | None] = OrderedDict()

    def run(
        self,
        flags: TrainingFlags,
        forward: Forward,
        *,
        buffers: Callable[[], Iterable[Buffers]] | None,
        modes: bool,
    ) -> Outputs:
        """Run ``forward``, and once more if it turns out that it draws.

        Args:
            flags: The training mode of all modules.
            forward: Runs the stages, with private generators if it is given the shared ones;
                returns the outputs, and whether anything was drawn from private generators.
            buffers: Keeps the buffers that forward may change, to run it again as if for the first
                time; None where nothing will be recomputed. Inputs are guarded by the stages.
            modes: Whether the caller has modes of its own: one more costs little then, and a
                counter must not see the forward twice.
        """
        if not self.shared:
            return forward(None)[0]
        shared = SharedGenerators(self.shared)
        draws = self._known.get(flags, _AT_FIRST)
        if draws is False and not modes:
            return self._run_bare(flags, forward, shared, buffers)
        outputs, drew = forward(shared)
        self._learn(flags, draws or drew)
        if drew:
            shared.advance()
        return outputs

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Forget at the end of a ``with`` block what was learnt in it."""
        known = self._known.copy()
        try:
            yield
        finally:
            self._known = known

    def _run_bare(
        self,
        flags: TrainingFlags,
        forward: Forward,
        shared: SharedGenerators,
        buffers: Callable[[], Iterable[Buffers]] | None,
    ) -> Outputs:
        """Run without private generators, and with them if the shared ones were moved by it."""
        before = None if buffers is None else list(buffers())
        outputs, _ = forward(None)
        if not shared.moved():
            return outputs
        shared.rewind()
        if before is None:  # what was drawn is good, if not the same on another run
            self._learn(flags, None)
        else:
            self._learn(flags, True)
            for each in before:
                each.refuse_lost()
                each.restore()
            outputs, _ = forward(shared)
        shared.advance()
        return outputs

    def _learn(self, flags: TrainingFlags, draws: bool | None) -> None:
        self._known[flags] = draws
        self._known.move_to_end(flags)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
