"""Builds the site: adds pages from outside docs/, and rewrites links to stay in the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from links import ELSEWHERE, Links  # MkDocs looks for modules beside this one
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = "javascripts/schedules.json"  # which docs/site/schedules.py has exported


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    schedules = ROOT / "build" / "schedules.json"
    files.append(File.generated(config, SCHEDULES, abs_src_path=str(schedules)))
    return files


def on_pre_page(page: Page, config: Any, files: Files) -> Page:
    """Point links to files of the repository to their page, or replace them by their text."""
    pages = {_source(file): file.src_uri for file in files if file.inclusion.is_included()}
    pages[ROOT / "README.md"] = "index.md"
    others = [each for each in config["markdown_extensions"] if not isinstance(each, Links)]
    config["markdown_extensions"] = [*others, Links(_source(page.file), pages)]
    return page


def _source(file: File) -> Path:
    return Path(str(file.abs_src_path)).resolve()
