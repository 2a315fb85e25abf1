"""Runs a forward so that the numbers that it draws do not depend on the timing of threads.

See Note [Drawing from private generators]. Whether a model draws is recorded for each training mode
of its modules, in the first mini-batch, which always runs with private generators.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import Buffers, SharedGenerators, TrainingFlags

Outputs = list[FlatTree]
Forward = Callable[[SharedGenerators | None], tuple[Outputs, bool]]
Snapshot = Callable[[bool], Iterable[Buffers]]


class _Seen(Enum):
    """In which mini-batches the layers were seen to draw."""

    NEVER = "in none"
    ONCE = "in the first, which an initialisation may do"
    ALWAYS = "in several"


_CAPACITY = 64  # training modes; the least recently used are dropped, and recorded again if needed

# Before about torch 2.9, a function given to torch.compile is never compiled once it has run in a
# dispatch mode. There a model is assumed to draw nothing until it does.
_ASSUMED = None if hasattr(TorchDispatchMode, "ignore_compile_internals") else _Seen.NEVER


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
        self._recorded: OrderedDict[TrainingFlags, _Seen] = OrderedDict()

    def run(
        self,
        flags: TrainingFlags,
        forward: Forward,
        *,
        buffers: Snapshot | None,
        modes: bool,
    ) -> Outputs:
        """Run ``forward``, and run it again if it draws although it did not before.

        Args:
            flags: The training flags of all modules.
            forward: Runs the stages, with private generators if it is given the shared ones;
                returns the outputs, and whether anything was drawn from private generators.
            buffers: Takes a snapshot of the buffers that forward may change, to run it again: of
                all of them if it is given True; None if nothing will be recomputed. The stages
                guard the inputs themselves.
            modes: Whether the caller has active function or dispatch modes: one more costs little
                then, and a counter must not see the forward twice.
        """
        if not self.shared:
            return forward(None)[0]
        shared = SharedGenerators(self.shared)
        seen = self._recorded.get(flags, _ASSUMED)
        if seen is _Seen.NEVER and not modes:
            return self._run_bare(flags, forward, shared, buffers)
        outputs, drew = forward(shared)
        self._record(flags, _after(seen, drew))
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
        buffers: Snapshot | None,
    ) -> Outputs:
        """Run without private generators, and again with them if that drew from the shared ones."""
        first = flags not in self._recorded
        before = None if buffers is None else list(buffers(first))
        outputs, _ = forward(None)
        if not shared.moved():
            self._record(flags, _Seen.NEVER)
            return outputs
        shared.rewind()
        if before is None:  # the numbers drawn are valid, but not reproducible
            self._recorded.pop(flags, None)
        else:
            self._record(flags, _Seen.ALWAYS)
            _restore(before)
            outputs, _ = forward(shared)
        shared.advance()
        return outputs

    def _record(self, flags: TrainingFlags, seen: _Seen) -> None:
        self._recorded[flags] = seen
        self._recorded.move_to_end(flags)
        if len(self._recorded) > _CAPACITY:
            self._recorded.popitem(last=False)


def _after(seen: _Seen | None, drew: bool) -> _Seen:
    """What is recorded after one more mini-batch with private generators."""
    if seen is None:
        return _Seen.ONCE if drew else _Seen.NEVER
    if seen is _Seen.ONCE and not drew:
        return _Seen.NEVER
    return _Seen.ALWAYS if drew else seen


def _restore(snapshots: Iterable[Buffers]) -> None:
    for each in snapshots:
        if each.lost is not None:
            module, name = each.lost
            raise RuntimeError(
                f"{type(module).__name__} must not edit its large buffer {name!r} in a forward in "
                "which layers draw random numbers for the first time after one in which they did "
                "not: the forward is run again, and the value before was not saved. Assign a new "
                "tensor to the buffer instead of editing it, or draw in the first mini-batch too."
            )
        each.restore()
