"""Builds the site: adds pages from outside docs/, and rewrites links to stay in the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import load
from links import ELSEWHERE, Links  # MkDocs looks for modules beside this one
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_OBJECT = re.compile(r"^::: (\S+)(\n    options:\n.*)?$", re.MULTILINE)
_ROLE = re.compile(r":[a-z]+:<code>~?([\w.]+)</code>")
SCHEDULES = "javascripts/schedules.json"  # which docs/site/schedules.py has exported


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    schedules = ROOT / "build" / "schedules.json"
    files.append(File.generated(config, SCHEDULES, abs_src_path=str(schedules)))
    return files


def on_nav(nav: Navigation, config: Any, files: Files) -> None:
    """Keep the pages in their order."""
    config["nav_pages"] = nav.pages


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> None:
    """Keep the text of a page, with docstrings where it names objects of the package."""
    page.text = _OBJECT.sub(_described, markdown)


def on_pre_page(page: Page, config: Any, files: Files) -> Page:
    """Point links to files of the repository to their page, or replace them by their text."""
    pages = {_source(file): file.src_uri for file in files if file.inclusion.is_included()}
    pages[ROOT / "README.md"] = "index.md"
    others = [each for each in config["markdown_extensions"] if not isinstance(each, Links)]
    config["markdown_extensions"] = [*others, Links(_source(page.file), pages)]
    return page


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Link the objects that docstrings name by Sphinx's roles, and end its ``::`` in one colon."""
    if not page.file.src_uri.startswith("api/"):
        return html
    return _ROLE.sub(_linked, html).replace("::</p>", ":</p>")


def on_post_build(config: Any) -> None:
    """Put the text of each page beside it, as ``index.md``, and list all in ``llms.txt``."""
    address, site = config["site_url"].rstrip("/"), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for page in config["nav_pages"]:
        text = site / page.file.dest_path
        text.with_suffix(".md").write_text(page.text, "utf-8")
        lines.append(f"- [{page.title}]({address}/{page.file.dest_uri.removesuffix('html')}md)")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _source(file: File) -> Path:
    return Path(str(file.abs_src_path)).resolve()


def _linked(match: re.Match[str]) -> str:
    """A link to an object, if it is on a page."""
    name = match[1].rpartition(".")[2]
    return f'<autoref identifier="{match[1]}" optional><code>{name}</code></autoref>'


def _described(match: re.Match[str]) -> str:
    """The docstring of an object, and those of its public members."""
    described = load(match[1], search_paths=[ROOT], resolve_aliases=True)
    lines = [f"## {described.path}", "", _docstring(described)]
    members = described.members.values() if described.is_class or described.is_module else ()
    for member in members:
        if member.docstring and not member.name.startswith("_") and not member.is_alias:
            lines += ["", f"### {described.name}.{member.name}", "", _docstring(member)]
    return "\n".join(lines)


def _docstring(described: Any) -> str:
    return described.docstring.value if described.docstring else ""
