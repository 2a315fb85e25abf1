"""What README shows is what the package does."""

from pathlib import Path

from lightning_gpipe.core.plan import fill_drain, one_each

README = Path(__file__).parents[1] / "README.md"


def test_the_schedule_that_it_shows() -> None:
    assert f"```\n{fill_drain(3, one_each(3), recomputed=2)}```" in README.read_text("utf-8")
