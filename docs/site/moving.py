"""Draws the picture of the home page from two schedules: ``python -m docs.site.moving``.

Four devices run one mini-batch, whole and in micro-batches, in the same time scale; what has not
run yet is hidden. A viewer that does not move pictures shows both mini-batches whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_gpipe.core.schedules import Kind, fill_drain

PICTURE = Path(__file__).parents[1] / "pictures" / "moving.svg"
DEVICES, CHUNKS = 4, 8

_WIDTH, _ROW, _HEAD, _TEXT = 640, 26, 30, 96  # pixels: of the picture, a row, a title, the names
_SECONDS = 9.0
_COLORS = {Kind.FORWARD: "#3b75af", Kind.BACKWARD: "#e8853d"}
_GREY = "#7f8792"  # legible on white and on black


def picture() -> str:
    """Return the picture, an SVG."""
    height = 2 * (_HEAD + DEVICES * _ROW) + 10
    whole = max(end for *_, end in _boxes(1))
    scale = (_WIDTH - _TEXT) / whole
    top = _HEAD + DEVICES * _ROW + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="20">',
        "<title>Four devices run a mini-batch whole, and in eight micro-batches</title>",
        f'<clipPath id="past"><rect x="{_TEXT}" width="{_WIDTH}" height="{height}">'
        f'<animate attributeName="width" values="0;{_WIDTH - _TEXT};{_WIDTH - _TEXT}" '
        f'keyTimes="0;0.85;1" dur="{_SECONDS}s" repeatCount="indefinite"/></rect></clipPath>',
        *_panel("chunks=1: the devices take turns", 1, 0, scale),
        *_panel(f"chunks={CHUNKS}: they work at the same time", CHUNKS, top, scale),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _panel(title: str, m: int, top: float, scale: float) -> Iterator[str]:
    yield f'<text x="{_TEXT}" y="{top + 20}" fill="{_GREY}">{title}</text>'
    for j in range(DEVICES):
        y = top + _HEAD + j * _ROW
        yield f'<text x="0" y="{y + 18}" fill="{_GREY}">device {j}</text>'
    yield '<g clip-path="url(#past)">'
    for kind, j, start, end in _boxes(m):
        x, width = _TEXT + start * scale, (end - start) * scale
        yield (
            f'<rect x="{x:.2f}" y="{top + _HEAD + j * _ROW}" width="{width - 1:.2f}" '
            f'height="{_ROW - 4}" fill="{_COLORS[kind]}"/>'
        )
    yield "</g>"


def _boxes(m: int) -> Iterator[tuple[Kind, int, float, float]]:
    """The actions of a mini-batch in ``m`` pieces: kind, device, start and end.

    A backward takes twice as long as a forward.
    """
    schedule = fill_drain(m, tuple(range(DEVICES)))
    times = schedule.simulate(lambda action: (1 if action.kind is Kind.FORWARD else 2) / m)
    for action, start in times.start.items():
        yield action.kind, action.j, start, times.end[action]


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
