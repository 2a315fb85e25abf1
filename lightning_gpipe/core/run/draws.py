"""Runs a mini-batch so that the numbers that it draws do not depend on the timing of threads.

See Note [Drawing from private generators]. Whether a model draws is recorded for each training mode
of its modules, in the first mini-batch, which always runs with private generators.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful import SharedGenerators, TrainingFlags
from lightning_gpipe.core.plan import Slot

T = TypeVar("T")
Outputs = list[FlatTree]
Forward = Callable[[SharedGenerators | None], Outputs]


class Restorable(Protocol):
    """A snapshot of what forward may change."""

    @property
    def lost(self) -> Slot | None:
        """The slot of an edited buffer whose value was not saved, if there is one."""
        ...

    def restore(self) -> None:
        """Restore it."""
        ...


Snapshots = Callable[[bool], Iterable[Restorable]]


class _Seen(Enum):
    """In which mini-batches the layers were seen to draw."""

    NEVER = "in none"
    ONCE = "in the first, which an initialisation may do"
    ALWAYS = "in several"


_CAPACITY = 64  # training modes; the least recently used are dropped, and recorded again if needed

# Before about torch 2.9, a function given to torch.compile is never compiled once it has run in a
# dispatch mode. There a forward is assumed to draw nothing until it does.
_ASSUMED = None if hasattr(TorchDispatchMode, "ignore_compile_internals") else _Seen.NEVER

_STRAYED = (
    "layers must draw random numbers by PyTorch's operators, or by custom ones tagged with "
    "torch.Tag.nondeterministic_seeded, and must not seed a generator: the generator that the "
    "workers share was used or set while a mini-batch ran with others in its place. What was drawn "
    "from it depends on the timing of threads."
)
_RECOMPUTED = (
    " If a layer drew it, its recomputation draws other numbers and its gradient is wrong: then "
    "write activation_checkpointing='never'."
)
_FIRST_IN_BACKWARD = (
    "layers must draw random numbers in their first backward if they do in later ones: they did "
    "for the first time after a backward in which they did not, and the numbers of this one depend "
    "on the timing of threads. Those of later ones do not."
)
_FIRST_IN_STEP = (
    "layers and training_step must draw random numbers in the first batch if they do in later "
    "ones: they did for the first time after a batch in which they did not, and the numbers of "
    "this one depend on the timing of threads. Those of later ones do not."
)


class Draws:
    """Records whether a pipeline draws random numbers, and redirects its draws.

    Args:
        devices: The device of each worker.
        spread: Whether other processes have workers too. No generator is a worker's own then:
            outside of the stages, all processes must draw the same.

    Attributes:
        shared: The devices whose generator several workers may draw from.
    """

    def __init__(self, devices: Sequence[torch.device], *, spread: bool = False) -> None:
        users = Counter(devices)
        shared = {device for device, workers in users.items() if workers > 1 or spread}
        several = len(devices) > 1 or spread
        self.shared = frozenset({torch.device("cpu"), *shared} if several else ())
        self._forward = _Record()
        self._backward = _Record()
        self._steps = _Record()
        self._told: set[str] = set()  # the warnings that were given

    def run(
        self,
        flags: TrainingFlags,
        forward: Forward,
        *,
        generators: SharedGenerators,
        snapshots: Snapshots | None,
        modes: bool,
        recomputed: bool = False,
    ) -> Outputs:
        """Run ``forward``, and run it again if it draws although it did not before.

        Args:
            flags: The training flags of all modules.
            forward: Runs the stages, with private generators if it is given the shared ones.
            generators: The shared ones, as they are now.
            snapshots: Takes snapshots of what forward may change, to run it again: of all of it if
                it is given True; None if nothing will be recomputed. The stages guard the inputs
                themselves.
            modes: Whether the caller has active function or dispatch modes: one more costs little
                then, and a counter must not see the forward twice.
            recomputed: Whether any micro-batch will be recomputed.

        Raises:
            RuntimeError: If a recomputation would draw other numbers.
        """
        if not self.shared:
            return forward(None)
        seen = self._forward.of(flags) or _ASSUMED
        try:
            if seen is _Seen.NEVER and not modes:
                return self._run_bare(flags, forward, generators, snapshots, recomputed)
            outputs = forward(generators)
            self._forward.set(flags, _after(seen, generators.drew))
            self._settle(generators, generators.drew, recomputed)
        except BaseException:
            generators.rewind()  # how far it came depends on timing, and differs between processes
            raise
        return outputs

    def run_backward(
        self,
        flags: TrainingFlags,
        backward: Callable[[SharedGenerators | None], T],
        *,
        generators: SharedGenerators,
        modes: bool,
    ) -> T:
        """Run ``backward``, which cannot be run again.

        Args:
            flags: The training flags of all modules in forward.
            backward: Runs the stages, with private generators if it is given the shared ones.
            generators: The shared ones, as they are now. Layers with activation checkpointing of
                their own set the state of before forward, and at last that of another stage.
            modes: Whether there are active function or dispatch modes.
        """
        return self._run_once(
            self._backward, flags, backward, generators, modes, _FIRST_IN_BACKWARD
        )

    def run_step(
        self,
        flags: TrainingFlags,
        step: Callable[[SharedGenerators | None], T],
        *,
        generators: SharedGenerators,
        modes: bool,
    ) -> T:
        """Run a whole step, the caller's code with it, which cannot be run again either.

        Args:
            flags: The training flags of all modules.
            step: Runs it, with private generators for the stages and the caller's code if it is
                given the shared ones.
            generators: The shared ones, as they are now.
            modes: Whether it must have private ones in any case: there are active modes, or
                forwards will be recomputed.
        """
        return self._run_once(self._steps, flags, step, generators, modes, _FIRST_IN_STEP)

    def _run_once(
        self,
        record: _Record,
        flags: TrainingFlags,
        run: Callable[[SharedGenerators | None], T],
        generators: SharedGenerators,
        modes: bool,
        late: str,
    ) -> T:
        """Run what cannot be run again; warn with ``late`` if it draws, but did not before."""
        if not self.shared:
            return run(None)
        seen = record.of(flags)
        bare = seen is _Seen.NEVER and not modes
        try:
            result = run(None if bare else generators)
            strayed = generators.moved()
        finally:
            generators.rewind()
        record.set(flags, _Seen.ALWAYS if bare and strayed else _after(seen, generators.drew))
        if strayed or generators.drew:
            generators.advance()
        if strayed:
            self._warn(late if bare else _STRAYED)
        return result

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Discard at the end of a ``with`` block what was recorded in it."""
        forward, backward, steps = self._forward.copy(), self._backward.copy(), self._steps.copy()
        try:
            yield
        finally:
            self._forward, self._backward, self._steps = forward, backward, steps

    def _run_bare(
        self,
        flags: TrainingFlags,
        forward: Forward,
        generators: SharedGenerators,
        snapshots: Snapshots | None,
        recomputed: bool,
    ) -> Outputs:
        """Run without private generators, and again with them if that drew from the shared ones."""
        before = None if snapshots is None else list(snapshots(flags not in self._forward))
        outputs = forward(None)
        if not generators.moved():
            self._forward.set(flags, _Seen.NEVER)
            return outputs
        generators.rewind()
        if before is None:  # the numbers drawn are valid, but not reproducible
            self._forward.forget(flags)
        else:
            self._forward.set(flags, _Seen.ALWAYS)
            _restore(before)
            outputs = forward(generators)
        self._settle(generators, True, recomputed)
        return outputs

    def _settle(self, generators: SharedGenerators, drew: bool, recomputed: bool) -> None:
        """Advance the shared generators once if anything was drawn from them or private ones.

        To have been drawn from they must have moved although private ones replaced them.
        """
        strayed = generators.moved()
        if strayed and recomputed and generators.untagged:
            raise RuntimeError(
                "operators that draw random numbers must be tagged as such in layers that are "
                f"recomputed: got {', '.join(generators.untagged)}, untagged, which would draw "
                "others on recomputation. Give its definition "
                "tags=(torch.Tag.nondeterministic_seeded,), or write "
                "activation_checkpointing='never'."
            )
        if strayed:
            generators.rewind()
        if strayed or drew:
            generators.advance()
        if strayed:
            self._warn(_STRAYED + (_RECOMPUTED if recomputed else ""))

    def _warn(self, message: str) -> None:
        """Warn, once for each message."""
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=2)


class _Record:
    """What was seen with each combination of training flags, for those that were used last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[TrainingFlags, _Seen] = OrderedDict()

    def of(self, flags: TrainingFlags) -> _Seen | None:
        """In which mini-batches the layers were seen to draw, or None before the first."""
        return self._seen.get(flags)

    def __contains__(self, flags: TrainingFlags) -> bool:
        return flags in self._seen

    def set(self, flags: TrainingFlags, seen: _Seen) -> None:
        """Record what was seen."""
        self._seen[flags] = seen
        self._seen.move_to_end(flags)
        if len(self._seen) > _CAPACITY:
            self._seen.popitem(last=False)

    def forget(self, flags: TrainingFlags) -> None:
        """Discard what was seen."""
        self._seen.pop(flags, None)

    def copy(self) -> _Record:
        """The same, as it is now."""
        copied = _Record()
        copied._seen = self._seen.copy()
        return copied


def _after(seen: _Seen | None, drew: bool) -> _Seen:
    """What is recorded after one more mini-batch with private generators."""
    if seen is None:
        return _Seen.ONCE if drew else _Seen.NEVER
    if seen is _Seen.ONCE and not drew:
        return _Seen.NEVER
    return _Seen.ALWAYS if drew else seen


def _restore(snapshots: Iterable[Restorable]) -> None:
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
