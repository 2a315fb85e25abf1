"""What the layers of a model hold, counted without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from lightning_gpipe.core.data import bytes_of
from lightning_gpipe.core.plan import LayerProfile


def held_by(
    root: nn.Module,
    layers: Sequence[Sequence[nn.Module]],
    names: Sequence[str],
    beside: Sequence[nn.Module],
    kept: Mapping[int, int],
) -> list[LayerProfile]:
    """Profiles with what each layer holds, and last one with what is around them.

    What several layers share counts for the first of them.

    Args:
        root: The model.
        layers: The modules of each layer.
        names: What to call each layer.
        beside: Modules that are not around the layers, although they are no layers.
        kept: The bytes that the optimizer keeps for a parameter, by its id.
    """
    counted: set[int] = set()
    found = [
        _holding(name, modules, counted, kept) for name, modules in zip(names, layers, strict=True)
    ]
    _holding("beside", beside, counted, kept)
    return [*found, _holding("around", [root], counted, kept)]


def _holding(
    name: str, modules: Sequence[nn.Module], counted: set[int], kept: Mapping[int, int]
) -> LayerProfile:
    parameters = _new((p for each in modules for p in each.parameters()), counted)
    buffers = _new((b for each in modules for b in each.buffers()), counted)
    return LayerProfile(
        name,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(map(bytes_of, parameters)),
        gradient_bytes=sum(bytes_of(p) for p in parameters if p.requires_grad),
        optimizer_bytes=sum(kept.get(id(p), 0) for p in parameters),
        buffer_bytes=sum(map(bytes_of, buffers)),
    )


def _new(tensors: Iterable[Tensor], counted: set[int]) -> list[Tensor]:
    """Those that were not counted yet."""
    found = []
    for tensor in tensors:
        if id(tensor) not in counted:
            counted.add(id(tensor))
            found.append(tensor)
    return found
