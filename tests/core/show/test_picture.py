from pathlib import Path

import pytest

from lightning_gpipe.core.plan import Action, Kind, fill_drain
from lightning_gpipe.core.run import Span
from lightning_gpipe.core.show import picture, timeline_picture


def spans_of(m: int, placement: tuple[int, ...]) -> list[Span]:
    """A mini-batch as its schedule predicts it, in actions of a second."""
    schedule = fill_drain(m, placement, recomputed=1)
    start = schedule.simulation.start
    return [Span(placement[a.j], a, start[a], start[a] + 1) for a in start]


def test_picture_of_a_mini_batch(tmp_path: Path) -> None:
    figure = timeline_picture(spans_of(2, (0, 1)), ["cpu 0", "cpu 1"], title="Step 3", note="idle")

    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu 0", "cpu 1"]
    legend = axes.get_legend()
    assert legend is not None
    words = ["forward", "recompute", "backward"]
    assert [text.get_text() for text in legend.get_texts()] == words
    assert axes.get_title(loc="left") == "Step 3"
    # F0 F1 .  B1 R0 B0, and F0 F1 between the two: 5 actions on each worker
    assert sorted(t.get_text() for t in axes.texts) == sorted(["idle", *"0100101001"])
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_virtual_stages_tells_them_apart() -> None:
    figure = timeline_picture(spans_of(1, (0, 1, 0, 1)), ["cpu 0", "cpu 1"])

    assert {"0/0", "0/3"} <= {text.get_text() for text in figure.axes[0].texts}


@pytest.mark.parametrize("spans", [[], [Span(0, Action(Kind.FORWARD, 0, 0), 1.0, 1.0)]])
def test_picture_of_nothing(spans: list[Span], tmp_path: Path) -> None:
    timeline_picture(spans, ["cpu"]).savefig(tmp_path / "timeline.png")


def test_picture_of_more_workers_than_rows(tmp_path: Path) -> None:
    figure = timeline_picture(spans_of(1, tuple(range(100))), [str(w) for w in range(100)])

    assert len(figure.axes[0].get_yticklabels()) == 25
    figure.savefig(tmp_path / "timeline.png")


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)

    with pytest.raises(ImportError, match=r"pip install 'lightning-gpipe\[pictures\]'"):
        timeline_picture([], [])
