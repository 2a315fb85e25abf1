"""The call of a step, and what is known of it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.module_list.tape.arguments import Path, Reading, title
from lightning_gpipe.core.frontends.module_list.tape.results import Result, with_returned_arguments


class RecordedCall(NamedTuple):
    """The call of a block, or of an operator that the user's forward applies between two blocks.

    Attributes:
        kind: Equal for calls that return the same structure for arguments of the same kind.
        name: The block or operator, as errors name it.
        line: The line of the user's code that calls it.
        modules: The modules whose state it may change.
        parameters: The names of its positional parameters.
    """

    run: Callable[..., Any]
    kind: Hashable
    name: str
    line: str
    stage: int
    device: torch.device
    modules: tuple[nn.Module, ...] = ()
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.line})"

    def titles(self, paths: Sequence[Path]) -> str:
        """Return the arguments at these paths, as the user knows them."""
        return " and ".join(title(path, self.parameters) for path in paths)


@dataclass
class Knowledge:
    """The knowledge about all calls of a kind, which one of them has shown.

    Attributes:
        result: The structure of what they return.
        readings: How their tensor arguments are cut, where the shape does not tell.
        filled_objects: The objects among their arguments that they fill, such as caches.
        shapes: The shapes of their results, by the shapes of their arguments.
    """

    result: Result
    readings: dict[Path, Reading]
    filled_objects: frozenset[Path] = frozenset()
    shapes: dict[Any, list[torch.Size | None]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if it is known which results have rows."""
        return all(getattr(leaf, "reading", 0) is not None for leaf in self.result.leaves)


def checked_result(
    name: str, expected: Result, objects: Sequence[tuple[Path, Any]], result: Any
) -> Any:
    """Return the tensor that a call returned in a stage, or the leaves of its tree.

    ``objects`` are arguments that are no tensors, which may be returned.

    Raises:
        RuntimeError: If the result has another structure than expected.
    """
    if expected.single and type(result) is Tensor:
        return result
    result = with_returned_arguments(result, objects)
    leaves = expected.flat(result)
    if leaves is None:
        raise RuntimeError(
            f"{name} must return values of the same kind as the first block like it: "
            f"expected {expected}, got {Result.of(result, None)}. The user's forward has "
            "gone on with the former. Let all blocks of a class return the same structure, and "
            "put numbers that depend on the input into tensors."
        )
    return leaves[0] if expected.single else leaves
