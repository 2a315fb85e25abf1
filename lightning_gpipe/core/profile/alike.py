"""Finds layers that are alike, since they cost the same.

The kinds of modules, their attributes, and the shapes of their tensors and inputs decide. Only the
first one of alike layers is counted, and its outputs stand for those of the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

from lightning_gpipe.core.data import FlatTree
from lightning_gpipe.core.layout import PLAIN, kind_of_tensor
from lightning_gpipe.core.programs import Part
from lightning_gpipe.core.run import Stage

KindOf = Callable[[nn.Module, bool], Hashable]  # as kind_of, which layers need not ask twice

_COMPARABLE = (Tensor, *PLAIN)


def key_of(
    stage: Stage, part: Part, inputs: FlatTree, kind_of: KindOf, *, numbered: bool
) -> Hashable:
    """Return a key equal for layers that cost the same; unique for one that cannot be compared.

    Unless ``numbered``, layers may differ in attributes that have their own numbers.
    """
    leaves = inputs.leaves
    if stage.arriving or stage.leaving or not all(isinstance(x, _COMPARABLE) for x in leaves):
        return id(stage)
    modules = tuple(kind_of(layer, numbered) for layer in stage.partition.layers)
    same = tuple(next(k for k, x in enumerate(leaves) if x is leaf) for leaf in leaves)
    values = tuple(kind_of_tensor(x) if isinstance(x, Tensor) else x for x in leaves)
    return modules, _of_part(part, kind_of, numbered), values, repr(inputs.spec), same


def repeated(stages: Sequence[Stage], kind_of: KindOf) -> list[bool]:
    """Return for each stage whether the modules of another one are alike but for their numbers."""
    kinds = [tuple(kind_of(layer, False) for layer in stage.partition.layers) for stage in stages]
    counts = Counter(kinds)
    return [counts[kind] > 1 for kind in kinds]


def _of_part(part: Part, kind_of: KindOf, numbered: bool) -> Hashable:
    """Return the calls of a part, with its values numbered in order of appearance."""
    names: dict[str, str] = {}

    def renamed(text: str) -> str:
        return re.sub(r"%\d+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text)

    calls = []
    for step in part.steps:
        text = renamed(str(step).replace(f" stage {step.stage}: {step.name}(", "(", 1))
        calls.append((text, _of_call(step.run, kind_of, numbered)))
    routes = [route.numbers for route in (*part.arriving, *part.leaving)]
    ends = tuple(
        renamed(" ".join(f"%{number}" for number in numbers))
        for numbers in (part.takes, part.gives, *routes)
    )
    return tuple(calls), ends, len(part.leaving)


def _of_call(run: Callable[..., Any], kind_of: KindOf, numbered: bool) -> Hashable:
    method, owner = (run.__func__, run.__self__) if isinstance(run, MethodType) else (None, run)
    return (method, kind_of(owner, numbered)) if isinstance(owner, nn.Module) else run
