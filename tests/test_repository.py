"""What the repository says of itself agrees with the package, and one file with another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.site.badges import FOLDER, badges, svg
from lightning_gpipe import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


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
