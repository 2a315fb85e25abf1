"""What a step calls, as far as it is known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_gpipe.core.frontends.module_list.arguments import Path, Reading, title
from lightning_gpipe.core.frontends.module_list.placeholder import Placeholder
from lightning_gpipe.core.frontends.module_list.results import Result, with_given


class Call(NamedTuple):
    """A block, or an operator that the user's forward applies between two blocks.

    Attributes:
        run: What is called.
        kind: Equal for calls that return the same structure for arguments of the same kind.
        name: What errors call it.
        line: The line of the user's code that calls it.
        stage: The stage that it runs in.
        device: The device of the stage.
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
        """The arguments at these paths, as the user knows them."""
        return " and ".join(title(path, self.parameters) for path in paths)


@dataclass
class Learned:
    """What one call has shown of all calls of its kind.

    Attributes:
        result: The structure of what they return.
        readings: How the tensors that they are given are cut, where the shape does not tell.
        filled: The objects among their arguments that they fill, such as caches.
        shapes: The shapes of their results, by the shapes of their arguments.
    """

    result: Result
    readings: dict[Path, Reading]
    filled: frozenset[Path] = frozenset()
    shapes: dict[Any, list[torch.Size | None]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it is known which results have rows."""
        return all(getattr(leaf, "reading", 0) is not None for leaf in self.result.leaves)


class Expected:
    """Sees that what a call returns in a stage is what is expected.

    Args:
        name: What errors call it.
        result: The structure that it is expected to return.
        objects: Arguments that are no tensors, which it may return.
    """

    def __init__(self, name: str, result: Result, objects: Sequence[tuple[Path, Any]] = ()) -> None:
        self._name = name
        self._result, self._single, self._objects = result, result.single, objects

    def checked(self, result: Any) -> Any:
        """What was returned: the tensor, or the leaves of its tree.

        Raises:
            RuntimeError: If it has another structure.
        """
        if self._single and type(result) is Tensor:
            return result
        result = with_given(result, self._objects)
        leaves = self._result.flat(result)
        if leaves is None:
            raise RuntimeError(
                f"{self._name} must return values of the same kind as the first block like it: "
                f"expected {self._result}, got {Result.of(result, None)}. The user's forward has "
                "gone on with the former. Let all blocks of a class return the same structure, and "
                "put numbers that depend on the input into tensors."
            )
        return leaves[0] if self._single else leaves


class Pick:
    """Picks a leaf of what a call returned."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return leaves[self._k]


def kind_of(leaf: Any) -> Any:
    """A hashable value, equal for two arguments of one kind."""
    if isinstance(leaf, Placeholder):
        return Tensor, leaf.leaf.dtype, leaf.leaf.dims
    if isinstance(leaf, Tensor):
        return Tensor, leaf.dtype, leaf.dim()
    if isinstance(leaf, bool | str | None | torch.dtype | torch.device):
        return leaf
    return type(leaf)
