"""The tensors of the files under the names of the model's tensors.

The names are those of the model's state dict, except for the name of the base model: a model with
a head has its base in a child, as in ``model.layers.0``, and the files may be of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_gpipe.core.frontends.stored import Stored


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers by all their names; a tied one has several."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def rename_to_fit(
    stored: Mapping[str, Stored], model: nn.Module, names: Set[str]
) -> dict[str, Stored]:
    """Name the tensors of the files as the model does: as they are, or for a base model."""
    return max(_renamings(stored, model), key=lambda renamed: len(names & renamed.keys()))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name is one of ``patterns``, in which ``*`` is for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _renamings(stored: Mapping[str, Stored], model: nn.Module) -> Iterator[dict[str, Stored]]:
    yield dict(stored)
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in stored.items()}
    for head in dict.fromkeys(name.partition(".")[0] for name in stored):
        yield {name.removeprefix(f"{head}."): tensor for name, tensor in stored.items()}
