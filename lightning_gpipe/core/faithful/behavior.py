"""Which inputs and buffers a stage's layers edit in place, as recorded in earlier runs.

To copy every input and every buffer before each run would always be correct, but double their
memory. So the first run copies all and records which of them the layers edit, and later runs copy
only those. Layers may behave differently in another training mode or for another structure of
inputs, so their behavior is recorded by call signature: the training flags and the structure.
"""

from __future__ import annotations

from collections.abc import Hashable

from lightning_gpipe.core.plan import Slot

TrainingFlags = bytes  # of each module, in order, 1 or 0: they are compared and hashed at once

_CAPACITY = 64  # call signatures; the least recently used are dropped, and recorded again if needed


class Behavior:
    """What layers edit in place, for one call signature.

    Attributes:
        edited_inputs: The indices of the input leaves that they edit, for each set of guarded
            leaves.
        edited_buffers: The slots of the buffers that they edit, or None before the first run.
        edited_parameters: The slots of the frozen parameters that they edit, or None before the
            first run.
        changed_attributes: The slots of the Python attributes whose contents they change, or None
            before the first run.
        captures: Whether they were seen to use tensors that require a gradient from outside, or
            from an earlier run.
        searches: How many runs were searched for such tensors.
        searching: Whether the next one is.
    """

    __slots__ = (
        "captures",
        "changed_attributes",
        "edited_buffers",
        "edited_inputs",
        "edited_parameters",
        "searches",
        "searching",
    )

    def __init__(self) -> None:
        self.edited_inputs: dict[tuple[int, ...], set[int]] = {}
        self.edited_buffers: set[Slot] | None = None
        self.captures = False
        self.searches = 0
        self.searching = True
        self.edited_parameters: frozenset[Slot] | None = None
        self.changed_attributes: frozenset[Slot] | None = None


class Behaviors:
    """The behavior of one stage's layers, for the call signatures that were used last."""

    def __init__(self) -> None:
        # The latest last. Not an OrderedDict, which hashes its keys to list its values.
        self._recorded: dict[Hashable, Behavior] = {}
        self._latest: tuple[TrainingFlags, Hashable, Behavior] | None = None

    @property
    def edited_parameters(self) -> set[Slot]:
        """The slots whose frozen parameters the layers edit for any call signature."""
        recorded = self._recorded.values()
        return set().union(*[each.edited_parameters or () for each in recorded])

    @property
    def all(self) -> Behavior:
        """What the layers change for any call signature, as far as recorded."""
        found, recorded = Behavior(), self._recorded.values()
        found.edited_buffers = set().union(*[each.edited_buffers or () for each in recorded])
        found.edited_parameters = frozenset(self.edited_parameters)
        changed = [each.changed_attributes or () for each in recorded]
        found.changed_attributes = frozenset().union(*changed)
        return found

    def of(self, flags: TrainingFlags, structure: Hashable) -> Behavior:
        """The behavior of the layers with these training flags, for this structure of inputs."""
        latest = self._latest  # to hash a structure takes longer than to see that it is the same
        if latest is not None and latest[0] == flags and latest[1] == structure:
            return latest[2]
        signature = flags, structure
        behavior = self._recorded.pop(signature, None) or Behavior()
        self._recorded[signature] = behavior
        if len(self._recorded) > _CAPACITY:
            del self._recorded[next(iter(self._recorded))]
        self._latest = flags, structure, behavior
        return behavior

    def __reduce__(self) -> tuple[type[Behaviors], tuple[()]]:
        return Behaviors, ()  # a copy records it anew; a file must not have PyTorch's TreeSpecs
