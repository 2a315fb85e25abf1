"""The skip layout: the layers that stash and pop each skip tensor, checked for faults.

Every skippable layer declares its names, so all faults are found at construction and reported
together. A stash must come before its pop in the order of the nn.Sequential's layers. Modules in
one layer may run in any order, so a stash and a pop in the same layer are only matched by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from lightning_gpipe.core.programs import Route, SkipName
from lightning_gpipe.core.skip.declare import Table, declaration_of, full_name


class Skip(NamedTuple):
    """One skip connection, by the indices of the two layers."""

    name: SkipName
    stash: int
    pop: int


class _Use(NamedTuple):
    layer: int
    path: str


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip tensor is stashed by one layer and popped by a later one.

    Raises:
        TypeError: Names every fault, with the layers.
    """
    skips_of(module)


def skips_of(layers: Iterable[nn.Module], stage_of: Sequence[int] = ()) -> list[Skip]:
    """Return the skip connections between layers, in the order of their stashes.

    Raises a TypeError that names every fault, with the stages if those of the layers are known.
    """
    stashes, pops = _uses(layers, stage_of)
    faults = [*_repeated(stashes, "stashed"), *_repeated(pops, "popped")]
    skips = []
    for name in dict.fromkeys([*stashes, *pops]):
        match stashes.get(name, []), pops.get(name, []):
            case [stash, *_], []:
                faults.append(f"{name} is stashed by {stash.path} and never popped")
            case [], [pop, *_]:
                faults.append(f"{name} is popped by {pop.path} and never stashed")
            case [stash, *_], [pop, *_] if pop.layer < stash.layer:
                faults.append(f"{name} is popped by {pop.path} before {stash.path} stashes it")
            case [stash, *_], [pop, *_]:
                skips.append(Skip(name, stash.layer, pop.layer))
    if faults:
        raise TypeError(
            "every skip tensor must be stashed by one layer and popped by one that comes after it: "
            f"got {'; '.join(faults)}. Layers that repeat names need a Namespace each: "
            "layer.isolate(namespace)."
        )
    return skips


def routes_of(skips: Iterable[Skip], stage_of: Sequence[int]) -> list[Route]:
    """Return the skip connections between different stages."""
    routes = (Route(skip.name, stage_of[skip.stash], stage_of[skip.pop]) for skip in skips)
    return [route for route in routes if route.source != route.target]


def table_of(arriving: Sequence[Route], tensors: Sequence[Any]) -> Table:
    """Return a table with the tensors that arrived at a stage."""
    return {route.name: tensor for route, tensor in zip(arriving, tensors, strict=True)}


def leaving_tensors(table: Table, leaving: Sequence[Route]) -> list[Any]:
    """Return the tensors in the table for other stages; raise if a skippable module did not run."""
    missing = [route.name for route in leaving if route.name not in table]
    remaining = table.keys() - {route.name for route in leaving}
    if missing or remaining:
        faults = [f"no module stashed {name}" for name in missing]
        faults += [f"no module popped {name}" for name in remaining]
        raise RuntimeError(
            "every skippable module within a layer must run in each forward: "
            f"{', '.join(faults)}. To pass nothing on, stash None."
        )
    return [table[route.name] for route in leaving]


def _uses(
    layers: Iterable[nn.Module], stage_of: Sequence[int]
) -> tuple[dict[SkipName, list[_Use]], dict[SkipName, list[_Use]]]:
    stashes: dict[SkipName, list[_Use]] = {}
    pops: dict[SkipName, list[_Use]] = {}
    for k, layer in enumerate(layers):
        for path, module in layer.named_modules():
            declaration = declaration_of(module)
            if declaration is None:
                continue
            stage = f", stage {stage_of[k]}" if stage_of else ""
            full_path = f"layer {k}{'.' + path if path else ''}"
            use = _Use(k, f"{full_path} ({type(module).__name__}{stage})")
            for uses, names in ((stashes, declaration.stash), (pops, declaration.pop)):
                for name in names:
                    uses.setdefault(full_name(module, name), []).append(use)
    return stashes, pops


def _repeated(uses: dict[SkipName, list[_Use]], verb: str) -> Iterator[str]:
    for name, repeated in uses.items():
        if len(repeated) > 1:
            yield f"{name} is {verb} by {' and by '.join(use.path for use in repeated)}"
