"""Writes the page of error messages from the code: ``python -m docs.site.errors``.

Each message says what must hold, what was found, and what to do. The page has the first and the
last, for what was found is the reader's own. Those of other packages that a user meets first are
listed here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_gpipe"
PAGE = ROOT / "docs" / "errors.md"

# The topics, with the page of the guide, and the folders and files whose messages are of it. The
# first that fits decides.
TOPICS: list[tuple[str, str, tuple[str, ...]]] = [
    ("The Trainer and the strategy", "index.md", ("strategy",)),
    ("The command line", "guide/plan.md", ("commands",)),
    ("Callbacks", "guide/monitoring.md", ("callbacks",)),
    ("Checkpoints", "guide/checkpoints.md", ("checkpoints",)),
    ("Which module, and which stages", "guide/devices.md", ("core/layout", "core/pipeline")),
    (
        "Models that are not a Sequential",
        "guide/any_model.md",
        ("core/frontends/module_list", "core/frontends/traced", "core/programs"),
    ),
    ("Pretrained weights and placed models", "guide/large_models.md", ("core/frontends",)),
    ("Batches and outputs", "guide/batches.md", ("core/data",)),
    ("Skip connections", "guide/skips.md", ("core/skip",)),
    ("Layers, state and random numbers", "guide/engine.md", ("core/faithful",)),
    ("Schedules", "guide/schedules.md", ("core/schedules", "core/run/micro_batch_losses")),
    ("Balance and plans", "guide/balance.md", ("core/balance", "core/planner", "core/profile")),
    ("A step", "guide/engine.md", ("core/run",)),
    ("Verification", "guide/verification.md", ("core/verify", "core/show")),
    ("Several processes", "guide/processes.md", ("core/transport", "distributed")),
]

_HEAD = """\
# Error messages

<!-- made by `python -m docs.site.errors` from the messages in the code -->

The errors of this package, to search by their words. A message says what must hold, what was found
(here "…") and what to do.
"""


# Messages of Lightning and jsonargparse where they do not find the strategy.
OTHERS = [
    (
        "You selected an invalid strategy name: `strategy='gpipe'`",
        "Write `import lightning_gpipe` above: that registers the name. In a LightningCLI of your "
        "own, import it in the script.",
    ),
    (
        "You selected an invalid strategy name",
        'Write `strategy="gpipe"`, or an object: `strategy=GPipeStrategy(...)`, not the class. In '
        "YAML, `strategy: lightning_gpipe.GPipeStrategy` is a name too. Fabric takes no "
        "GPipeStrategy, and neither do Trainers of `pytorch_lightning`.",
    ),
    (
        'Parser key "trainer.strategy": Expected a dot import path string: gpipe',
        "A name takes no options. Write `class_path: lightning_gpipe.GPipeStrategy` with "
        "`init_args`, or `--trainer.strategy=GPipeStrategy --trainer.strategy.chunks=8`.",
    ),
    (
        "Option 'chunk' is not accepted",
        "`GPipeStrategy` has no such argument: see `--trainer.strategy.help=GPipeStrategy`.",
    ),
]


_SAID = "The message says what to write, by what was found."
_FOUND = re.compile(r": (?:got|found)\b")


def page() -> str:
    """Return the page, in Markdown."""
    sections = [_HEAD, _section("Messages of Lightning", "index.md#configuration-files", OTHERS)]
    for k, (title, guide, _) in enumerate(TOPICS):
        rows = sorted(
            {row for path in _modules() if _topic_of(path) == k for row in _messages(path)},
            key=lambda row: (row[0].lower().lstrip("…`'(= "), row),
        )
        sections.append(_section(title, guide, rows))
    return "\n".join(sections)


def _section(title: str, guide: str, rows: Iterable[tuple[str, str]]) -> str:
    """A section of the page, with a row for each message."""
    table = [f"| {must} | {way_out} |" for must, way_out in rows]
    head = f"## {title}\n\n[The guide]({guide})\n\n| what must hold | what to do |\n|---|---|"
    return "\n".join([head, *table, ""])


def _modules() -> Iterator[Path]:
    yield from sorted(PACKAGE.rglob("*.py"))


def _topic_of(path: Path) -> int | None:
    name = path.relative_to(PACKAGE).as_posix()
    fitting = (k for k, (*_, places) in enumerate(TOPICS) if name.startswith(places))
    return next(fitting, None)


def _messages(path: Path) -> Iterator[tuple[str, str]]:
    """What must hold, and what to do, of each message in a file."""
    for text in _texts(ast.parse(path.read_text("utf-8"))):
        must, *rest = _FOUND.split(text, maxsplit=1)
        way_out = "".join(rest).partition(". ")[2]
        if len(must) > 12 and way_out:
            yield _cell(must), _cell(_SAID if way_out == "…" else way_out)


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts that the code of a file may say, with "…" for values."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _cell(text: str) -> str:
    for mark in ("|", "*", "__"):
        text = text.replace(mark, "".join(f"\\{character}" for character in mark))
    return " ".join(text.replace("<", "&lt;").split())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
