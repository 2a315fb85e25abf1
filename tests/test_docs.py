"""What README and the guide show is what happens: code runs, and links lead somewhere."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import pytest

import lightning_gpipe
from docs.site import errors, moving
from tests.promises import page as promises
from tests.support.pages import DOCS, GUIDE, README, ROOT, SITE, blocks, name_of, prose, run_blocks

OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")]

_HEADING = re.compile(r"#{1,6} +(.+)")
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_INLINE_CODE = re.compile(r"`[^`]*`")


def anchors(page: str) -> list[str]:
    """The names by which the headings of a page are linked to, as GitHub and MkDocs make them."""
    titles = [found[1] for line in prose(page) if (found := _HEADING.fullmatch(line))]
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]


def relative_links(path: Path) -> list[str]:
    """What a file links to within the repository."""
    text = "\n".join(prose(path.read_text("utf-8")))
    return [link for link in _LINK.findall(_INLINE_CODE.sub("", text)) if "://" not in link]


def broken_links(path: Path) -> list[str]:
    """The relative links of a file that lead to no file, or to no heading in it."""
    found = []
    for link in relative_links(path):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            found.append(link)
    return found


# Code.


@pytest.mark.parametrize("page", [README, *SITE], ids=name_of)
def test_code_of_a_page(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # a Trainer writes to where it is

    run_blocks(page, blocks(page.read_text("utf-8")), monkeypatch, capsys)


# Links.


@pytest.mark.parametrize("path", [README, *OTHERS, *SITE], ids=name_of)
def test_links_of_a_file(path: Path) -> None:
    assert broken_links(path) == []


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text(
        "# One `word`, (two)\n[a](#one-word-two) [b](#three) [c](other.md) [d](other.md#four)\n"
        "[e](none.md) `[f](none.md)` [g](https://none/#five)\n"
        "```text\n# Three\n[h](none.md)\n```\n",
        "utf-8",
    )
    other.write_text("# Fourth\n", "utf-8")

    assert broken_links(page) == ["#three", "other.md#four", "none.md"]


@pytest.mark.parametrize("page", [DOCS / "index.md", *GUIDE], ids=name_of)
def test_links_of_the_guide_stay_in_it(page: Path) -> None:
    # A site is made of docs/ alone.
    targets = {
        link: (page.parent / link.partition("#")[0]).resolve() for link in relative_links(page)
    }

    assert [link for link, target in targets.items() if DOCS not in [target, *target.parents]] == []


def test_index_lists_every_page_of_the_guide() -> None:
    linked = {link.partition("#")[0] for link in relative_links(DOCS / "index.md")}

    assert {f"guide/{page.name}" for page in GUIDE} <= linked


def test_one_page_says_how_to_install() -> None:
    """Pages, a notebook and errors said to run ``pip install 'lightning-gpipe[pictures]'``.

    No index has that package: pip failed, or would have installed one that somebody else publishes
    under this name. From the repository, with its address, it is this one.
    """
    modules, examples = (ROOT / "lightning_gpipe").rglob("*.py"), (ROOT / "examples").glob("*.*")
    wrong = re.compile(
        r"lightning[-_]gpipe\[[a-z]+\](?! @ git)|pip install ['\"]?lightning[-_]gpipe"
    )

    assert [
        name_of(path)
        for path in [README, *SITE, *examples, *modules]
        if path != DOCS / "index.md" and wrong.search(path.read_text("utf-8"))
    ] == []


def test_site_has_every_page() -> None:
    order = (ROOT / "mkdocs.yml").read_text("utf-8")

    assert [page for page in SITE if page.relative_to(DOCS).as_posix() not in order] == []


def test_table_of_the_arguments_has_all_of_them() -> None:
    table = (DOCS / "guide" / "arguments.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE)
    arguments = signature(lightning_gpipe.GPipeStrategy).parameters

    assert sorted(rows) == sorted(arguments)


def test_api_lists_every_public_name() -> None:
    pages = [page.read_text("utf-8") for page in (DOCS / "api").glob("*.md")]
    listed = [line for page in pages for line in page.splitlines() if line.startswith(":::")]

    assert {f"::: lightning_gpipe.{name}" for name in lightning_gpipe.__all__} <= {*listed}
    assert len(listed) == len({*listed})


# Promises.


def test_every_test_of_a_promise_names_it() -> None:
    names = [promise.name for promise in promises.PROMISES]
    tests = (ROOT / "tests" / "promises").glob("test_*.py")

    assert [name_of(path) for path in tests if promises.promise_of(path)[0] not in names] == []


def test_page_of_the_promises_is_up_to_date() -> None:
    """``python -m tests.promises.page`` writes it."""
    assert promises.PAGE.read_text("utf-8") == promises.page()


# Figures.


def test_figures_of_the_readme_are_those_of_the_whole_table() -> None:
    _, section = README.read_text("utf-8").split("\n## Figures\n")
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    whole = (DOCS / "guide" / "figures.md").read_text("utf-8").splitlines()

    assert len(rows) == 1 + 5
    assert [row for row in rows if row not in whole] == []


def test_page_of_the_errors_is_up_to_date() -> None:
    """``python -m docs.site.errors`` writes it."""
    assert errors.PAGE.read_text("utf-8") == errors.page()


def test_moving_picture_is_that_of_the_schedules() -> None:
    """``python -m docs.site.moving`` writes it."""
    assert moving.PICTURE.read_text("utf-8") == moving.picture()
