"""Pipelines over several processes, and what they are compared by."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpipe.core.data import tree_flatten
from tests.support.faults import Fuse
from tests.support.models import rows
from tests.support.ranks import group_of

Owners = tuple[int, ...]


def processes(owners: Owners | None, backend: str = "gloo") -> dict[str, Any]:
    """The arguments of a pipeline of these owners."""
    if owners is None:
        return {}
    return {"owners": owners, "group": group_of(len(set(owners)), backend)}


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def assert_equal(actual: Any, expected: Any) -> None:
    """Equal in structure and, to the bit, in value."""
    (found, structure), (wanted, other) = tree_flatten(actual), tree_flatten(expected)
    assert structure == other
    for one, two in zip(found, wanted, strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == two


def layers() -> nn.Sequential:
    """Three layers, each with a fuse."""
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(3, 3), Fuse()) for _ in range(3)]
    return nn.Sequential(*blocks).double()


def step(pipeline: nn.Module) -> Tensor:
    """The loss of a step on eight rows."""
    loss = pipeline(rows(8)).square().mean()
    loss.backward()
    return loss.detach()


def said(run: Callable[[], object]) -> str:
    """The error that a run ends with, in a line."""
    try:
        run()
    except BaseException as error:
        return f"{type(error).__name__} | {error}"
    return "none"
