"""What is known of a stage's layers from the runs before: what they edit in place.

To copy every input and every buffer before each run would always be right, and cost the memory of
all of them once more. So the first run is watched, and from then on only what it edited is copied.
Layers may do something else in another training mode or for another structure of inputs, so what is
known is known for a call signature: those two together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from lightning_gpipe.core.plan import Slot

TrainingFlags = tuple[bool, ...]  # of each module, in order

_KNOWN = 64  # call signatures; what is forgotten is learnt again


class Behavior:
    """What layers do for one call signature.

    Attributes:
        edited_inputs: The indices of the input leaves that they edit, for each set of leaves that
            had to be watched.
        edited_buffers: Where the buffers are that they edit, or None before the first run.
    """

    __slots__ = ("edited_buffers", "edited_inputs")

    def __init__(self) -> None:
        self.edited_inputs: dict[tuple[int, ...], set[int]] = {}
        self.edited_buffers: set[Slot] | None = None


class Behaviors:
    """What is known of one stage's layers, for the call signatures that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Behavior] = OrderedDict()

    def of(self, flags: TrainingFlags, structure: Hashable) -> Behavior:
        """What the layers do in a training mode, for inputs of a structure."""
        signature = flags, structure
        found = self._known.setdefault(signature, Behavior())
        self._known.move_to_end(signature)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return found
