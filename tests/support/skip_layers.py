"""Functions that make layers which stash and pop."""

from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.skip.declare import Namespace, pop, skippable, stash

Of = Callable[[Any], Tensor | None]
Join = Callable[[Any, Any], Any]
Forward = Generator[Any, Any, Any]


def itself(x: Any) -> Any:
    """What is stashed: the input."""
    return x


def added(x: Any, skip: Any) -> Any:
    """The sum of both, or the input alone."""
    return x if skip is None else x + skip


def ignored(x: Any, skip: Any) -> Any:
    """The input alone."""
    return x


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes ``of(x)`` and returns ``then(x)``."""

    def __init__(self, of: Of = itself, then: Callable[[Any], Any] = itself) -> None:
        super().__init__()
        self.of = of
        self.then = then

    def forward(self, x: Any) -> Forward:
        yield stash("skip", self.of(x))
        return self.then(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Returns ``join(x, skip)``."""

    def __init__(self, join: Join = added) -> None:
        super().__init__()
        self.join = join

    def forward(self, x: Any) -> Forward:
        skip = yield pop("skip")
        return self.join(x, skip)


def pair(of: Of = itself, join: Join = added) -> tuple[Stash, Pop]:
    """Two layers that belong together, apart from all others."""
    namespace, one, other = Namespace(), Stash(of), Pop(join)
    one.isolate(namespace)  # type: ignore[operator]  # skippable adds it
    other.isolate(namespace)  # type: ignore[operator]
    return one, other
