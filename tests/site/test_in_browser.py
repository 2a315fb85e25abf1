"""The built pages in a browser: what moves, moves as in the package, and each page fits its screen.

It needs Chromium; `make docs` says so where there is none.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from docs.site.schedules import export
from lightning_gpipe.core.schedules import Action, Kind, schedule_for
from tests.support.live_activations import peak_live
from tests.support.pages import ROOT

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")

from playwright.sync_api import Browser, Page, sync_playwright

BUILT = ROOT / "build" / "site"
PAGES = [path.parent.relative_to(BUILT).as_posix() for path in sorted(BUILT.rglob("index.html"))]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# Nothing is looked for outside of this machine.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(BUILT))) as server:
        thread = threading.Thread(target=server.serve_forever, name="site", daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def schedules(browser: Browser, address: str) -> Iterator[Page]:
    """The page on which schedules are tried."""
    page = browser.new_page()
    page.goto(f"{address}/try_a_schedule/")
    page.wait_for_selector("[data-ready=true]")
    yield page
    page.close()


# Devices, micro-batches and which of these are recomputed.
SETTINGS = [(2, 3, "never"), (4, 8, "always"), (3, 6, "except_last"), (8, 1, "never")]
COSTS = {"F": 1.0, "B": 0.7, "W": 1.6}


def cost(split: bool, stages_per_device: int, action: Action) -> float:
    if action.by_caller:
        return 0.0
    b = COSTS["B"] + (0 if split else COSTS["W"])
    of_kind = {Kind.FORWARD: COSTS["F"], Kind.RECOMPUTE: COSTS["F"], Kind.BACKWARD: b}
    return of_kind.get(action.kind, COSTS["W"]) / stages_per_device


@pytest.mark.parametrize("kind", export()["kinds"], ids=lambda kind: kind["title"])
def test_page_computes_what_the_package_computes(schedules: Page, kind: dict[str, Any]) -> None:
    name, split = kind["name"], kind["split"]
    for devices, m, which in SETTINGS:
        makespan, bubble, live, placement = schedules.evaluate(
            "([name, costs, split]) => { const { data, simulate } = window.schedules;"
            " const { makespan, bubble, live } ="
            " simulate(data, data.schedules[name], costs, split);"
            " return [makespan, bubble, live, data.schedules[name].placement]; }",
            [f"{name} {'split' if split else 'whole'} {devices} {m} {which}", COSTS, split],
        )
        recomputed = {"never": 0, "except_last": m - 1, "always": m}[which]
        schedule = schedule_for(name, m, tuple(placement), recomputed=recomputed, split=split)
        expected = schedule.simulate(partial(cost, split, len(placement) // devices))
        assert makespan == pytest.approx(expected.makespan)
        assert bubble == pytest.approx(expected.bubble)
        assert tuple(live) == peak_live(schedule)


def test_sliders_change_the_picture(schedules: Page) -> None:
    shows = schedules.locator
    assert shows("[data-shows=picture] rect").count() == 4 * 2 * 8
    assert shows("td[data-shows=bubble]").inner_text() == "27 %"  # 3 / (8 + 3)

    schedules.select_option("[name=kind]", label="zero bubble")
    schedules.locator("[name=devices]").fill("0")

    assert shows("[data-shows=picture] rect").count() == 2 * 3 * 8
    code = shows("[data-shows=code]").inner_text()
    assert code == 'GPipeStrategy(chunks=8, schedule="zero_bubble")'


# What fits its column on a screen: code and tables, on a phone only tables of few columns.
FITS = {
    1400: "article pre > code, article .md-typeset__scrollwrap",
    400: "article .md-typeset__scrollwrap:not(:has(th:nth-child(4)))",
}
# The first lines of those that do not.
_CUT = """
(selector) => [...document.querySelectorAll(selector)]
    .filter((block) => block.scrollWidth > block.clientWidth)
    .map((block) => block.innerText.split("\\n")[0])
"""


@pytest.mark.parametrize("width", FITS)
def test_pages_fit_the_screen(browser: Browser, address: str, width: int) -> None:
    """No page is wider than the screen; only code and tables of many columns scroll on a phone."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    errors: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda asked: elsewhere.append(asked.url))
    wide = []
    for name in PAGES:
        page.goto(f"{address}/{name}/")
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(name)
        wide += [f"{name}: {line}" for line in page.evaluate(_CUT, FITS[width])]
    page.close()

    assert len(PAGES) > 30
    assert (wide, errors) == ([], [])
    assert [url for url in elsewhere if not url.startswith((address, "data:"))] == []


def test_export_is_that_of_the_build() -> None:
    built = json.loads((BUILT / "javascripts" / "schedules.json").read_text("utf-8"))

    assert built == json.loads(json.dumps(export()))
    assert Path(BUILT / "javascripts" / "schedules.js").exists()
