"""A reader copies code from the site that was built: it is that of the sources, and it runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.site.links import ELSEWHERE
from tests.support.pages import DOCS, ROOT, SITE, Block, blocks, name_of, prose, run_blocks

BUILT = ROOT / "build" / "site"
API = sorted((DOCS / "api").glob("*.md"))
PAGES = [page for page in [*map(ROOT.joinpath, ELSEWHERE), *SITE] if page not in API]

_INLINE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_COMMENT = re.compile(r"^<!--.+?-->", re.DOTALL | re.MULTILINE)


class Code(HTMLParser):
    """The code of a built page.

    Attributes:
        blocks: The text of each ``pre``, without signatures of the API.
        inline: The text of each ``code`` elsewhere in the article.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.inline: list[str] = []
        self._signatures: list[str] = []
        self._division = ""
        self._within: list[str] | None = None  # of the three
        _, _, article = page.partition("<article")
        self.feed(article.partition("</article")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self._division = dict(attrs).get("class") or ""
        elif tag == "pre":
            signature = "doc-signature" in self._division
            self._within = self._signatures if signature else self.blocks
            self._within.append("")
        elif tag == "code" and self._within is None:
            self._within = self.inline
            self._within.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" or (tag == "code" and self._within is self.inline):
            self._within = None

    def handle_data(self, data: str) -> None:
        if self._within is not None:
            self._within[-1] += data


def built(page: Path) -> Code:
    """The code of the page that was built of a source."""
    name = ELSEWHERE.get(name_of(page)) or page.relative_to(DOCS).as_posix()
    folder = name.removesuffix(".md").removesuffix("index")
    return Code((BUILT / folder / "index.html").read_text("utf-8"))


def sources(page: Path) -> list[Block]:
    return list(blocks(page.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_a_page(page: Path) -> None:
    assert built(page).blocks == [block.text for block in sources(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_inline_code_of_a_page(page: Path) -> None:
    text = _COMMENT.sub("", "\n".join(prose(page.read_text("utf-8"))))

    assert built(page).inline == [code for _, code in _INLINE.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # a Trainer writes to where it is
    pairs = zip(sources(page), built(page).blocks, strict=True)

    run_blocks(page, [block._replace(text=text) for block, text in pairs], monkeypatch, capsys)


def test_blocks_of_the_api_are_those_of_docstrings() -> None:
    modules = (ROOT / "lightning_gpipe").rglob("*.py")
    lines = {line.strip() for path in modules for line in path.read_text("utf-8").splitlines()}
    blocks_of_api = [block for page in API for block in built(page).blocks]
    shown = [line.strip() for block in blocks_of_api for line in block.splitlines()]

    assert shown
    assert [line for line in shown if line not in lines] == []
