"""What README shows is what the package does, also where a package index shows it."""

import re
import tomllib

from lightning_gpipe.core.schedules import fill_drain
from tests.support.pages import README, ROOT, blocks, prose
from tests.support.placements import one_each


def indexed(text: str) -> str:
    """The text of a README as pyproject.toml changes it for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_the_schedule_that_it_shows() -> None:
    assert f"```\n{fill_drain(3, one_each(3), recomputed=2)}```" in README.read_text("utf-8")


def test_links_for_a_package_index() -> None:
    text = "[a](b.md) [`c`](d.md#e) [f\ng](h) [i](https://j)"

    assert indexed(text) == "a `c` f\ng [i](https://j)"


def test_code_for_a_package_index() -> None:
    """Code that looks like a link, such as ``norms[0](x)``, lost its brackets and parentheses."""
    text = "`a[0](x)`\n```python\nb[1](x)  # `\n```\n``c[2](x)``\n[`d`](e.md)"

    assert indexed(text) == text.replace("[`d`](e.md)", "`d`")


def test_blocks_for_a_package_index() -> None:
    text = README.read_text("utf-8")
    without_code = re.sub(r"`[^`]*`", "", "\n".join(prose(indexed(text))))

    assert [block.text for block in blocks(indexed(text))] == [block.text for block in blocks(text)]
    assert re.findall(r"\]\((?!https?://)", without_code) == []
