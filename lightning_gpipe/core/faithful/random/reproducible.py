"""Makes draws independent of the timing of threads: Note [Drawing from private generators]."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.faithful.journal import patched
from lightning_gpipe.core.faithful.managers import Manager
from lightning_gpipe.core.faithful.random.generators import SharedGenerators
from lightning_gpipe.core.faithful.random.random_state import RandomState
from lightning_gpipe.core.faithful.state.behavior import record
from lightning_gpipe.core.faithful.state.stage_state import ModuleState

T = TypeVar("T")
Outputs = list[FlatTree]
Forward = Callable[[SharedGenerators | None], Outputs]
Snapshots = Callable[[bool], Iterable[ModuleState | RandomState]]

_FORWARD = "forward"


class _Frequency(Enum):
    """The number of earlier mini-batches in which layers drew random numbers."""

    NEVER = "in none"
    ONCE = "in the first, which an initialisation may do"
    ALWAYS = "in several"


# Before about torch 2.9, a function given to torch.compile is never compiled once it has run in a
# dispatch mode. There a forward is assumed to draw nothing until it does.
_ASSUMED = None if hasattr(TorchDispatchMode, "ignore_compile_internals") else _Frequency.NEVER

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
_FIRST = (
    "{} must draw random numbers in {} if they do in later ones: they did for the first time after "
    "a {} in which they did not, and the numbers of this one depend on the timing of threads. "
    "Those of later ones do not."
)
_LATE = {
    "backward": _FIRST.format("layers", "their first backward", "backward"),
    "step": _FIRST.format("layers and training_step", "the first batch", "batch"),
}


class RandomDraws:
    """Records whether a pipeline draws random numbers, and redirects its draws.

    ``shared`` are the devices whose generator several workers may draw from: all of them if the
    pipeline is ``spread``, since outside of the stages all processes must draw the same.
    """

    def __init__(self, devices: Sequence[torch.device], *, spread: bool = False) -> None:
        users = Counter(devices)
        shared = {device for device, workers in users.items() if workers > 1 or spread}
        several = len(devices) > 1 or spread
        self.shared = frozenset({torch.device("cpu"), *shared} if several else ())
        self._history: dict[tuple[str, bytes], _Frequency] = {}
        self._warnings: set[str] = set()  # each is given once

    def run(
        self,
        flags: bytes,
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
            forward: Runs the stages, with private generators if it gets the shared ones.
            snapshots: Captures the state that forward may change, to run it again: all of it if its
                argument is True; None if nothing is recomputed. The stages guard the inputs.
            modes: Whether the caller has active function or dispatch modes: one more costs little
                then, and a counter must not see the forward twice.
        """
        if not self.shared:
            return forward(None)
        key = _FORWARD, flags
        frequency = self._history.get(key) or _ASSUMED
        bare = frequency is _Frequency.NEVER and not modes
        before = None
        try:
            if bare and snapshots is not None:
                before = list(snapshots(key not in self._history))
            outputs = forward(None if bare else generators)
            drew = generators.moved() if bare else generators.drew
            record(self._history, key, _after(frequency, drew))
            if bare and not drew:
                return outputs
            if bare:
                generators.rewind()
                if before is None:  # the numbers drawn are valid, but not reproducible
                    self._history.pop(key, None)
                else:
                    for snapshot in before:
                        snapshot.restore()
                    outputs = forward(generators)
            self._settle(generators, drew, recomputed)
        except BaseException:
            generators.rewind()  # how far it came depends on timing, and differs between processes
            raise
        return outputs

    def run_once(
        self,
        kind: str,
        flags: bytes,
        run: Callable[[SharedGenerators | None], T],
        *,
        generators: SharedGenerators,
        modes: bool,
    ) -> T:
        """Run what cannot run again, ``backward`` or ``step``, and warn if it draws unexpectedly.

        In a backward the shared states may change without a draw: layers with checkpointing of
        their own set the state of before forward. ``modes``: use private generators in any case.
        """
        if not self.shared:
            return run(None)
        frequency = self._history.get((kind, flags))
        bare = frequency is _Frequency.NEVER and not modes
        try:
            result = run(None if bare else generators)
            strayed = generators.moved()
        finally:
            generators.rewind()
        late = bare and strayed
        record(
            self._history,
            (kind, flags),
            _Frequency.ALWAYS if late else _after(frequency, generators.drew),
        )
        if strayed or generators.drew:
            generators.advance()
        if strayed:
            self._warn(_LATE[kind] if bare else _STRAYED)
        return result

    def unchanged(self) -> Manager:
        """Discard at the end of a ``with`` block what was recorded in it."""
        return patched([(vars(self), "_history", self._history.copy())])

    def _settle(self, generators: SharedGenerators, drew: bool, recomputed: bool) -> None:
        """Advance the shared generators once if anything was drawn from them or private ones."""
        strayed = generators.moved()  # although private ones stood in for them
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
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(message, stacklevel=2)


def _after(frequency: _Frequency | None, drew: bool) -> _Frequency:
    if frequency is None:
        return _Frequency.ONCE if drew else _Frequency.NEVER
    if frequency is _Frequency.ONCE and not drew:
        return _Frequency.NEVER
    return _Frequency.ALWAYS if drew else frequency
