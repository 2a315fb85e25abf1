"""What the repository says of itself agrees with the package, and one file with another."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from docs.site.badges import FOLDER, badges, svg
from lightning_gpipe import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
PACKAGE = ROOT / "lightning_gpipe"
TESTS = ROOT / "tests"


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", badges())
def test_badge_says_what_the_project_says(name: str) -> None:
    picture = (FOLDER / f"{name}.svg").read_text("utf-8")

    assert picture == svg(name, badges()[name]), "run python -m docs.site.badges"
    assert f"docs/pictures/badges/{name}.svg" in text_of("README.md")


def test_citation_is_of_this_version() -> None:
    citation = text_of("CITATION.cff")

    assert f"version: {__version__}\n" in citation
    assert f"license: {PROJECT['license']}\n" in citation
    assert REPOSITORY in citation


@pytest.mark.parametrize("listed", ["constraints.txt", "constraints-oldest.txt"])
def test_readme_names_the_tested_versions(listed: str) -> None:
    readme = " ".join(text_of("README.md").split())
    pins = re.findall(r"^(torch|lightning)==(\d+\.\d+)", text_of(listed), re.MULTILINE)
    first = dict(reversed(pins))  # torch stands a second time for a Python of the future

    named = f"torch {first['torch']} and Lightning {first['lightning']} with"
    assert re.search(rf"{re.escape(named)} [a-z ]+ in `{listed}`", readme)


def test_one_address() -> None:
    """The site and the index of packages lead to the same repository."""
    assert f"repo_url: {REPOSITORY}\n" in text_of("mkdocs.yml")
    assert f"site_url: {PROJECT['urls']['Documentation']}\n" in text_of("mkdocs.yml")
    others = [url for name, url in PROJECT["urls"].items() if name != "Documentation"]
    assert all(url.startswith(REPOSITORY) for url in others)


def test_commands_for_assistants_exist() -> None:
    commands = re.findall(r"^make ([\w-]+)", text_of("AGENTS.md"), re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)

    assert commands
    assert set(commands) <= set(targets)


def test_folders_for_assistants_exist() -> None:
    rows = [line for line in text_of("AGENTS.md").splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+/)`", row.split("|")[1])]

    assert named
    for name in named:
        assert any((root / name).is_dir() for root in (ROOT, *ROOT.glob("lightning_gpipe/**/")))


@pytest.mark.parametrize("workflow", ["test", "release"])
def test_workflows_run_targets_that_exist(workflow: str) -> None:
    steps = re.findall(r"run: make ([\w-]+)", text_of(f".github/workflows/{workflow}.yml"))
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)

    assert steps
    assert set(steps) <= set(targets)


def has_code(path: Path) -> bool:
    """Return whether a module defines a class or a function, and is no door."""
    body = ast.parse(path.read_text("utf-8")).body
    defines = any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in body)
    return defines and not path.stem.startswith("__")


def named_modules() -> set[str]:
    """The names in double backticks in the first docstrings of test files."""
    trees = (ast.parse(path.read_text("utf-8")) for path in TESTS.rglob("test_*.py"))
    docstrings = "\n".join(ast.get_docstring(tree) or "" for tree in trees)
    return set(re.findall(r"``([a-z0-9_/]+)``", docstrings))


def test_every_module_has_a_test_file_of_its_name_or_one_that_names_it() -> None:
    """A name is enough if no other module has it; else the folder goes before it: ``wire/link``."""
    modules = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    named = named_modules()

    def is_named(module: Path) -> bool:
        alone = sum(other.name == module.name for other in modules) == 1
        return "/".join(module.parts[-2:]) in named or (alone and module.name in named)

    missing = [
        str(module)
        for module in modules
        if has_code(PACKAGE / f"{module}.py")
        and not (TESTS / module.parent / f"test_{module.name}.py").is_file()
        and not is_named(module)
    ]
    assert missing == []
