"""The parameters, buffers and optimizer state of layers, counted without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from lightning_gpipe.core.balance import LayerProfile
from lightning_gpipe.core.data import bytes_of


def static_costs(
    root: nn.Module,
    layers: Sequence[Sequence[nn.Module]],
    names: Sequence[str],
    beside: Sequence[nn.Module],
    state_bytes: Mapping[int, int],
) -> list[LayerProfile]:
    """Return the profile of each layer, and last of what is around them, ``beside`` left out.

    A tensor that several layers share counts for the first of them.
    """
    counted: set[int] = set()
    groups = [*zip(names, layers, strict=True), ("beside", beside), ("around", [root])]
    profiles = [_profile(name, modules, counted, state_bytes) for name, modules in groups]
    return [*profiles[:-2], profiles[-1]]


def _profile(
    name: str, modules: Sequence[nn.Module], counted: set[int], state_bytes: Mapping[int, int]
) -> LayerProfile:
    parameters = _uncounted((p for module in modules for p in module.parameters()), counted)
    buffers = _uncounted((b for module in modules for b in module.buffers()), counted)
    return LayerProfile(
        name,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(map(bytes_of, parameters)),
        gradient_bytes=sum(bytes_of(p) for p in parameters if p.requires_grad),
        optimizer_bytes=sum(state_bytes.get(id(p), 0) for p in parameters),
        buffer_bytes=sum(map(bytes_of, buffers)),
    )


def _uncounted(tensors: Iterable[Tensor], counted: set[int]) -> list[Tensor]:
    """Return the tensors that are not counted yet, and count them."""
    new = {id(tensor): tensor for tensor in tensors if id(tensor) not in counted}
    counted.update(new)
    return list(new.values())
