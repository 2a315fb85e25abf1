"""Compares the processes before they begin.

With another model, balance or version a process would wait in vain, or compute wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gpipe.distributed.group import Group
from lightning_gpipe.version import __version__

_MOST = 3  # differences in a message
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same in all processes."""
    others = {f"version of {each.__name__}": str(each.__version__) for each in (torch, L)}
    return {"version of lightning-gpipe": __version__, **others}


def shapes(module: nn.Module) -> dict[str, Any]:
    """Return the classes of a module's children and the shapes of its parameters, by name."""
    kinds = {name or "the model": type(each).__name__ for name, each in module.named_modules()}
    sizes = {
        name: "later" if is_lazy(x) else tuple(x.shape) for name, x in module.named_parameters()
    }
    return {f"class of {name}": kind for name, kind in kinds.items()} | {
        f"shape of {name}": size for name, size in sizes.items()
    }


def check_same(group: Group, facts: Mapping[str, Any]) -> None:
    """Compare the named values of all processes; raise RuntimeError in all if some differ."""
    # An object without a text of its own has its address in it.
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in facts.items()}
    with group.waiting_for("a comparison of all processes", texts) as same:
        if same:
            return
    everyone = group.all(texts)
    differences = list(_differences(everyone))
    if differences:
        more = f", and {len(differences) - _MOST} more" * (len(differences) > _MOST)
        raise RuntimeError(
            "all processes must run the same script with the same arguments, model and versions: "
            f"{'; '.join(differences[:_MOST])}{more}. Start the same on each machine."
        )


def _differences(everyone: list[dict[str, str]]) -> Iterator[str]:
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        for name in first | facts:
            if first.get(name) != facts.get(name):
                here, there = facts.get(name, "none"), first.get(name, "none")
                yield f"the {name} is {here} on rank {rank} and {there} on rank 0"
