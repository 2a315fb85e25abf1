"""Rewrites the links of a page in the tree that Markdown has parsed.

In the text of a page, ``norms[0](x)`` looks like a link; only a parser knows that it is code, be it
fenced, indented, inline or within HTML. In the tree, a link is an element ``a``.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

# Pages of the site whose files are outside docs/.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}


class Links(Extension):
    """Points the links of a file to pages of the site, and removes links to other files.

    Args:
        source: The file.
        pages: The path on the site of each file that has one.
    """

    def __init__(self, source: Path, pages: Mapping[Path, str]) -> None:
        super().__init__()
        self._source = source
        self._pages = pages

    def extendMarkdown(self, md: Markdown) -> None:
        # After inline code and links (20), before MkDocs resolves links (0).
        md.treeprocessors.register(_Rewriter(self), "links", 1)

    def target(self, link: str) -> str | None:
        """Return the target of a link on the site, or None for a file that is not on it.

        A link to no file is not changed: MkDocs reports it and ends the build.
        """
        name, mark, anchor = link.partition("#")
        file = (self._source.parent / name).resolve()
        if not name or "://" in link or not file.exists():
            return link
        if file not in self._pages:
            return None
        here = posixpath.dirname(self._pages[self._source])
        return posixpath.relpath(self._pages[file], here) + mark + anchor


class _Rewriter(Treeprocessor):
    def __init__(self, links: Links) -> None:
        super().__init__()
        self._links = links

    def run(self, root: Element) -> None:
        for element in root.iter("a"):
            target = self._links.target(element.attrib.pop("href"))
            if target is None:
                element.tag = "span"
            else:
                element.set("href", target)
