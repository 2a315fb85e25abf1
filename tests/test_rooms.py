"""The rooms of the package: imports go down, through the doors, and core never sees Lightning.

The imports are read off the source by ``ast``, those inside functions and under TYPE_CHECKING too;
nothing is executed, so a module that needs what this machine lacks is checked all the same.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

PACKAGE = "lightning_gpipe"
ROOT = Path(__file__).parents[1] / PACKAGE

# Top to bottom. The rooms of one row stand side by side and do not import one another; within a
# room modules import one another.
ORDER = """
__main__  __init__
callbacks  commands
strategy
checkpoints  distributed
skip  pretrained
version
════════ above may import Lightning, below may not ════════
core.verify
core.pipeline
core.frontends  core.profile  core.show
core.run
core.transport
core.planner
core.faithful  core.skip  core.balance
core.layout
core.programs
core.schedules
core.data
"""

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
DRAWING = {"rich", "matplotlib"}
PURE = ["core.schedules.schedule", "core.balance.solver"]  # plain numbers

Imports = Mapping[str, set[str]]

ROWS = [line.split() for line in ORDER.strip().splitlines() if "═" not in line][::-1]
ROOMS = [room for row in ROWS for room in row]


def room_of(module: str) -> str:
    """The room of a module, as the table names it."""
    parts = module.split(".")
    room = ".".join(parts[:2]) if parts[0] == "core" else parts[0]
    assert room in ROOMS, f"{module} must be in one of the rooms of ORDER: got {room!r}."
    return room


def floor_of(module: str) -> int:
    """The row in which the module's room is, counted from the lowest."""
    return next(k for k, row in enumerate(ROWS) if room_of(module) in row)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(source: str) -> Iterator[str]:
    """Yield the full name of each module that the source imports.

    ``from package import x`` imports the module package.x where there is one, unless the package
    exports an x of its own.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "a relative import, which the linter forbids"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                exported = alias.name in exports(own(node.module))
                yield full if own(full) in MODULES and not exported else node.module


@cache
def names_of(module: str) -> set[str]:
    """The full names that a module imports from others."""
    nodes = ast.walk(ast.parse(MODULES[module].read_text("utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in imports for alias in node.names}


@cache
def exports(package: str | None) -> set[str]:
    """What a package of ours imports to hand it on."""
    path = MODULES.get(package or "")
    if path is None or path.name != "__init__.py":
        return set()
    body = ast.parse(path.read_text("utf-8")).body
    found = (alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names)
    return {alias.asname or alias.name for alias in found}


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
        if module != "core"
    }


def faults_of(imports: Imports) -> list[str]:
    """List the imports that go up, aside, or into a room past its door."""
    faults = []
    for module, names in inner(imports).items():
        for name in names:
            if room_of(name) == room_of(module):
                continue
            if floor_of(name) >= floor_of(module):
                faults.append(f"{module} imports {name}")
            elif name != room_of(name):
                faults.append(f"{module} imports {name} past the door of {room_of(name)}")
    return sorted(faults)


IMPORTS = {module: set(imported(path.read_text("utf-8"))) for module, path in MODULES.items()}
CORE = [module for module in MODULES if module.startswith("core.")]


@pytest.mark.parametrize("module", CORE)
def test_every_module_of_core_is_in_a_room(module: str) -> None:
    room_of(module)


def test_only_the_facade_is_in_no_room() -> None:
    loose = {path.name for path in (ROOT / "core").glob("*.py")}

    assert loose == {"__init__.py"}


def test_top_level_has_folders_and_few_short_doors() -> None:
    loose = list(ROOT.glob("*.py"))

    assert len(loose) <= 6
    assert all(len(path.read_text("utf-8").splitlines()) <= 70 for path in loose)


def test_folder_has_at_most_twenty_files() -> None:
    sizes = Counter(path.parent for path in MODULES.values())

    assert max(sizes.values()) <= 20


def test_no_file_name_is_twice_in_core() -> None:
    names = Counter(path.name for module, path in MODULES.items() if module.startswith("core."))
    names.pop("__init__.py")

    assert max(names.values()) == 1


FOLDERS = [room for room in ROOMS if MODULES[room].name == "__init__.py" and room != "__init__"]


@pytest.mark.parametrize("room", FOLDERS)
def test_room_says_its_idea_at_the_door(room: str) -> None:
    docstring = ast.get_docstring(ast.parse(MODULES[room].read_text("utf-8")))

    assert docstring is not None
    assert len(re.findall(r"[.:]\s|\.$", docstring)) >= 2, "two sentences"


@pytest.mark.parametrize("room", FOLDERS)
def test_door_hands_on_only_what_is_used(room: str) -> None:
    others = (name for name in MODULES if name != "core" and room_of(name) != room)
    used = {
        full.rpartition(".")[2]
        for full in chain.from_iterable(map(names_of, others))
        if full.rpartition(".")[0] == f"{PACKAGE}.{room}"
    }
    door = ast.walk(ast.parse(MODULES[room].read_text("utf-8")))
    at_the_door = {node.id for node in door if isinstance(node, ast.Name)}

    assert exports(room) - used - at_the_door == set()


def test_modules_import_only_from_below_and_through_doors() -> None:
    assert faults_of(IMPORTS) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    list(TopologicalSorter(inner(IMPORTS)).static_order())


@pytest.mark.parametrize("module", CORE)
def test_core_never_imports_lightning(module: str) -> None:
    assert not LIGHTNING & {name.split(".")[0] for name in IMPORTS[module]}


@pytest.mark.parametrize("module", CORE)
def test_only_show_draws(module: str) -> None:
    used = DRAWING & {name.split(".")[0] for name in IMPORTS[module]}

    assert not used or room_of(module) == "core.show"


@pytest.mark.parametrize("module", PURE)
def test_values_are_computed_without_torch(module: str) -> None:
    known = {name.split(".")[0] for name in IMPORTS[module] if own(name) is None}

    assert known <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize(
    "imports, faults",
    [
        ({"core.run.stage": {f"{PACKAGE}.core.schedules"}}, []),
        ({"core.balance": {f"{PACKAGE}.core.balance.costs"}}, []),
        ({"strategy": {"lightning.pytorch", PACKAGE}}, ["strategy imports __init__"]),
        (
            {"core.schedules.schedule": {f"{PACKAGE}.core.run"}},
            ["core.schedules.schedule imports core.run"],
        ),
        (
            {"core.show.stages": {f"{PACKAGE}.core.frontends"}},
            ["core.show.stages imports core.frontends"],
        ),
        (
            {"core.run.stage": {f"{PACKAGE}.core.schedules.schedule"}},
            ["core.run.stage imports core.schedules.schedule past the door of core.schedules"],
        ),
        (
            {"core.data.pytree": {f"{PACKAGE}.core.pipeline"}},
            ["core.data.pytree imports core.pipeline"],
        ),
    ],
)
def test_import_that_must_not_be_is_seen(imports: Imports, faults: list[str]) -> None:
    assert faults_of(imports) == faults


def test_module_without_a_room_is_seen() -> None:
    with pytest.raises(AssertionError, match="core.novelty must be in one of the rooms"):
        room_of("core.novelty")


def test_circle_is_seen() -> None:
    circle = {"core.data.a": {f"{PACKAGE}.core.data.b"}, "core.data.b": {f"{PACKAGE}.core.data.a"}}

    with pytest.raises(CycleError):
        list(TopologicalSorter(inner(circle)).static_order())


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import os.path
from lightning_gpipe.core.schedules import schedule
from lightning_gpipe.core.layout.partition import Partition
if TYPE_CHECKING:
    from lightning.pytorch import Trainer
def late():
    import torch
"""
    assert set(imported(source)) == {
        "os.path",
        "lightning_gpipe.core.schedules.schedule",
        "lightning_gpipe.core.layout.partition",
        "lightning.pytorch",
        "torch",
    }
