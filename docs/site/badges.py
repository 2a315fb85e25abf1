"""Draws the badges of the README from pyproject.toml: ``python -m docs.site.badges``.

They are files of the repository and say nothing but what is in it, so they are true without a
network, in each checkout.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures" / "badges"

_HEIGHT, _LETTER, _MARGIN = 20, 6.6, 6.0  # pixels; the letters are those of an 11 pixel font
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img" \
aria-label="{name}: {value}">
<clipPath id="r"><rect width="{width:.0f}" height="{height}" rx="3"/></clipPath>
<g clip-path="url(#r)">
<rect width="{left:.0f}" height="{height}" fill="#444"/>
<rect x="{left:.0f}" width="{right:.0f}" height="{height}" fill="#3949ab"/>
</g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{at:.1f}" y="14">{name}</text>
<text x="{then:.1f}" y="14">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """Return what each badge says, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = dict(each.split(">=") for each in project["dependencies"])
    return {
        "python": f"{project['requires-python'].removeprefix('>=')} or newer",
        "torch": f"{bounds['torch']} or newer",
        "lightning": f"{bounds['lightning']} or newer",
        "license": project["license"],
    }


def svg(name: str, value: str) -> str:
    """Return the picture of a badge."""
    left, right = (2 * _MARGIN + _LETTER * len(text) for text in (name, value))
    return _SVG.format(
        name=name,
        value=value,
        width=left + right,
        height=_HEIGHT,
        left=left,
        right=right,
        at=left / 2,
        then=left + right / 2,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, value in badges().items():
        (FOLDER / f"{name}.svg").write_text(svg(name, value), "utf-8")
