"""Which tensor in the files is which of the model's.

The names are those of the model's state dict, but for the name of the base model: a model with a
head has its base in a child, as in ``model.layers.0``, and the files may be of either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from lightning_gpipe.core.frontends.stored import Stored


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers by all their names; a tied one has several."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def fitted(stored: Mapping[str, Stored], model: nn.Module) -> dict[str, Stored]:
    """The tensors of the files under the model's names: as they are, or for a base model."""
    names = named_tensors(model).keys()
    return max(_renamed(stored, model), key=lambda found: len(names & found.keys()))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name is one of ``patterns``, in which ``*`` is for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _renamed(stored: Mapping[str, Stored], model: nn.Module) -> Iterator[dict[str, Stored]]:
    yield dict(stored)
    for child, _ in model.named_children():
        yield {f"{child}.{name}": each for name, each in stored.items()}
    for head in dict.fromkeys(name.partition(".")[0] for name in stored):
        yield {name.removeprefix(f"{head}."): each for name, each in stored.items()}
