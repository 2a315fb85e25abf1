"""How the site changes a page: its links lead to pages of the site, and its code stays."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

pytest.importorskip("markdown", reason="needs Markdown: pip install markdown")

from markdown import markdown

from docs.site.links import Links

# Text of pages, and the code in it.
CODE = {
    "fenced": ("```python\nx = self.norms[0](x)\n```", "x = self.norms[0](x)"),
    "other fence": ("~~~\nself.norms[0](x)\n~~~", "self.norms[0](x)"),
    "fence in a fence": ("~~~~\n```\nself.norms[0](x)\n```\n~~~~", "```\nself.norms[0](x)\n```"),
    "indented": ("Text:\n\n    self.norms[0](x)\n", "self.norms[0](x)"),
    "inline": ("Call `self.layers[:3](x)`.", "self.layers[:3](x)"),
    "link in code": ("Write ``[`a`](../../code.py)``.", "[`a`](../../code.py)"),
    "code in a link": ("[`self.layers[:3](x)`](other.md)", "self.layers[:3](x)"),
    "in HTML": ("<pre>self.norms[0](x)</pre>", "self.norms[0](x)"),
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of a guide, beside which is another one; the folder above has more files."""
    guide = tmp_path / "docs" / "guide"
    guide.mkdir(parents=True)
    for file in guide / "page.md", guide / "other.md", tmp_path / "NEWS.md", tmp_path / "code.py":
        file.touch()
    return guide / "page.md"


def on_site(text: str, page: Path) -> str:
    """The HTML of a page with this text."""
    pages = {
        page: "guide/page.md",
        page.with_name("other.md"): "guide/other.md",
        page.parents[2] / "NEWS.md": "news.md",
    }
    return markdown(text, extensions=["fenced_code", Links(page, pages)])


@pytest.mark.parametrize("text, code", CODE.values(), ids=CODE)
def test_code_that_looks_like_a_link(text: str, code: str, page: Path) -> None:
    """Links were rewritten in the text of a page, and in its code too.

    ``self.norms[0](x)`` became ``self.norms0``: a recipe that a reader copied from the site ended
    in an AttributeError.
    """
    assert code in html.unescape(on_site(text, page))


@pytest.mark.parametrize(
    "link, expected",
    [
        ("[a](other.md#b)", '<a href="other.md#b">a</a>'),
        ("[a][1]\n\n[1]: other.md", '<a href="other.md">a</a>'),
        ("[a](../../NEWS.md#b)", '<a href="../news.md#b">a</a>'),
        ("[`a`](../../code.py)", "<span><code>a</code></span>"),
        ("[a](../..)", "<span>a</span>"),
        ("[a](#b)", '<a href="#b">a</a>'),
        ("[a](https://b.org/#c)", '<a href="https://b.org/#c">a</a>'),
        ("[a](none.md)", '<a href="none.md">a</a>'),  # of which MkDocs tells
        ("![a](../../code.py)", '<img alt="a" src="../../code.py" />'),
    ],
)
def test_links_of_a_page(link: str, expected: str, page: Path) -> None:
    assert on_site(link, page) == f"<p>{expected}</p>"
