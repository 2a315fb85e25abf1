"""Makes a site of docs/: pages from elsewhere in the repository, links that stay in the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

# Pages of the site that are files of the repository.
_ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in _ELSEWHERE.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links to files of the repository lead to their page, or be their text."""
    names = {name: source for source, name in _ELSEWHERE.items()}
    at = (ROOT / names.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if not target or "://" in target:
            return link[0]
        path = (at / target).resolve().relative_to(ROOT).as_posix()
        if path == "README.md":
            path = "docs/index.md"
        uri = _ELSEWHERE.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(uri) is None or (uri == path and uri not in names):
            return text
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{uri}{anchor})"

    return _LINK.sub(led, markdown)
