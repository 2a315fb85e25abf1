"""The layers of the package: a module imports only from below, and core never sees Lightning.

The imports are read off the source by ``ast``, those inside functions and under TYPE_CHECKING too;
nothing is executed, so a module that needs what this machine lacks is checked all the same.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "lightning_gpipe"
ROOT = Path(__file__).parents[1] / PACKAGE

# Top to bottom; an indented line continues the row above it. Modules of one row do not import one
# another, but for the lowest row, and for those that share an entry `x.*`, which stands for the
# package x and all modules in it.
ORDER = """
__main__
__init__
callbacks.*  cli
strategy
precision  checkpoint_io  refusals  skip  flatten
════════ above may import Lightning, below may not ════════
core
core.swap
core.parity.*
core.pipeline
core.autograd
core.minibatch
core.worker
core.stage_pass  core.transport.local  core.transport.process_group
core.stage
core.schedule  core.timeline  core.microbatch.*  core.pytree  core.partition  core.balance.*
    core.sharing  core.context  core.recompute  core.randomness  core.batchnorm  core.shadow
    core.buffers  core.inplace  core.modes  core.snapshot  core.locate  core.placement
    core.journal  core.whole  core.managers  core.roots  core.skip.*  core.transport
    core.transport.copies  core.transport.threads
"""

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
PURE = ["core.schedule", "core.balance.solver"]  # a value that needs no tensors is computed without

Imports = Mapping[str, set[str]]


def rows() -> list[list[str]]:
    """The entries of each row, the lowest row first."""
    top_down: list[list[str]] = []
    for line in ORDER.strip().splitlines():
        if line.startswith(" "):
            top_down[-1] += line.split()
        elif "═" not in line:
            top_down.append(line.split())
    return top_down[::-1]


def covers(entry: str, module: str) -> bool:
    package = entry.removesuffix(".*")
    return module == package or (entry != package and module.startswith(f"{package}."))


def place(module: str) -> tuple[int, str]:
    """Where the table has the module: row, counted from the lowest, and entry."""
    found = [(k, entry) for k, row in enumerate(rows()) for entry in row if covers(entry, module)]
    assert len(found) == 1, f"{module} must have one place in ORDER: got {found}. Add it there."
    return found[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(source: str) -> Iterator[str]:
    """Yield the full name of each module that the source imports.

    ``from package import x`` imports the module package.x where there is one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "a relative import, which the linter forbids"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if own(full) in MODULES else node.module


def own(full: str) -> str | None:
    """The name of one of our modules as the table has it, or None for another's module."""
    if full == PACKAGE:
        return "__init__"
    return full.removeprefix(f"{PACKAGE}.") if full.startswith(f"{PACKAGE}.") else None


def inner(imports: Imports) -> Imports:
    """The imports of our own modules only, as the table names them."""
    return {
        module: {name for full in names if (name := own(full)) is not None}
        for module, names in imports.items()
    }


def upward(imports: Imports) -> list[str]:
    """List the imports, each a fault, that do not go down."""
    faults = []
    for module, names in inner(imports).items():
        row, entry = place(module)
        for name in names:
            below, other = place(name)
            allowed = below < row or (below == row and (row == 0 or entry == other))
            if not allowed:
                faults.append(f"{module} imports {name}")
    return sorted(faults)


IMPORTS = {module: set(imported(path.read_text("utf-8"))) for module, path in MODULES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_one_place_in_the_order(module: str) -> None:
    place(module)


def test_modules_import_only_from_below() -> None:
    assert upward(IMPORTS) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    list(TopologicalSorter(inner(IMPORTS)).static_order())


@pytest.mark.parametrize("module", [module for module in MODULES if covers("core.*", module)])
def test_core_never_imports_lightning(module: str) -> None:
    assert not LIGHTNING & {name.split(".")[0] for name in IMPORTS[module]}


def test_stage_and_transport_do_not_know_each_other() -> None:
    known = inner(IMPORTS)
    transport = [module for module in MODULES if covers("core.transport.*", module)]

    assert transport
    assert not known["core.stage"] & set(transport)
    assert not any("core.stage" in known[module] for module in transport)


@pytest.mark.parametrize("module", PURE)
def test_values_are_pure_python(module: str) -> None:
    assert {name.split(".")[0] for name in IMPORTS[module]} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "imports, faults",
    [
        ({"core.stage": {f"{PACKAGE}.core.schedule"}}, []),
        ({"core.balance": {f"{PACKAGE}.core.balance.costs"}}, []),
        ({"core.skip.layout": {f"{PACKAGE}.core.partition"}}, []),
        ({"strategy": {"lightning.pytorch", PACKAGE}}, ["strategy imports __init__"]),
        ({"core.stage": {f"{PACKAGE}.core.worker"}}, ["core.stage imports core.worker"]),
        (
            {"core.stage": {f"{PACKAGE}.core.transport.local"}},
            ["core.stage imports core.transport.local"],
        ),
        ({"core.schedule": {f"{PACKAGE}.core"}}, ["core.schedule imports core"]),
    ],
)
def test_import_that_goes_up_is_seen(imports: Imports, faults: list[str]) -> None:
    assert upward(imports) == faults


def test_module_without_a_place_is_seen() -> None:
    with pytest.raises(AssertionError, match="core.novelty must have one place in ORDER"):
        place("core.novelty")


def test_circle_is_seen() -> None:
    circle = {"core.pytree": {f"{PACKAGE}.core.skip"}, "core.skip": {f"{PACKAGE}.core.pytree"}}

    with pytest.raises(CycleError):
        list(TopologicalSorter(inner(circle)).static_order())


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import os.path
from lightning_gpipe.core import schedule
from lightning_gpipe.core.partition import Partition
if TYPE_CHECKING:
    from lightning.pytorch import Trainer
def late():
    import torch
"""
    assert set(imported(source)) == {
        "os.path",
        "lightning_gpipe.core.schedule",
        "lightning_gpipe.core.partition",
        "lightning.pytorch",
        "torch",
    }
