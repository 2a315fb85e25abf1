"""Writes the page with the table: ``python -m tests.lightning.features``."""

from tests.lightning.features.table import TESTS, page

(TESTS.parent / "docs" / "guide" / "lightning.md").write_text(page(), "utf-8")
