from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lightning_gpipe.core.schedules import Action, Kind, Span, fill_drain, schedule_for
from lightning_gpipe.core.show import picture, timeline_picture
from tests.support.placements import one_each


def spans_of(m: int, placement: tuple[int, ...], *, split: bool = False) -> list[Span]:
    """A mini-batch as its schedule predicts it, in actions of a second."""
    schedule = fill_drain(m, placement, recomputed=1, split=split)
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


def test_weights_that_are_computed_apart_have_a_colour_of_their_own() -> None:
    figure = timeline_picture(spans_of(2, (0, 1), split=True), ["cpu 0", "cpu 1"])

    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[-1].get_text() == "weights"
    colours = {patch.get_facecolor() for patch in legend.get_patches()}
    assert len(colours) == 4


def test_virtual_stages_of_a_worker_have_a_lane_each() -> None:
    figure = timeline_picture(spans_of(1, (0, 1, 0, 1)), ["cpu 0", "cpu 1"])

    # F0 of stages 0 to 3, one after the other: the upper lane of each worker, then the lower
    texts = [text for text in figure.axes[0].texts if text.get_text() == "0"]
    places = sorted(text.get_position() for text in texts)
    heights = [y for _, y in places[:4]]
    assert heights == pytest.approx([-0.2, 0.8, 0.2, 1.2])


@pytest.mark.parametrize("workers, lines", [(2, 5), (4, 3), (16, 3), (24, 2), (64, 2)])
def test_names_of_workers_do_not_overlap(workers: int, lines: int) -> None:
    names = ["\n".join([f"cuda:{w}"] * lines) for w in range(workers)]
    figure = timeline_picture(spans_of(1, tuple(range(workers))), names)

    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(a.y0 >= b.y1 for a, b in pairwise(boxes))


@pytest.mark.parametrize("spans", [[], [Span(0, Action(Kind.FORWARD, 0, 0), 1.0, 1.0)]])
def test_picture_of_nothing(spans: list[Span], tmp_path: Path) -> None:
    timeline_picture(spans, ["cpu"]).savefig(tmp_path / "timeline.png")


def test_picture_of_more_workers_than_rows(tmp_path: Path) -> None:
    figure = timeline_picture(spans_of(1, tuple(range(100))), [str(w) for w in range(100)])

    assert len(figure.axes[0].get_yticklabels()) == 20
    figure.savefig(tmp_path / "timeline.png")


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)

    with pytest.raises(ImportError, match="Run pip install matplotlib."):
        timeline_picture([], [])


def test_labels_of_a_kind_are_all_there_or_none() -> None:
    """Of 60 forwards only 0 to 9 have room; there is one recompute."""
    figure = timeline_picture(spans_of(60, (0,)), ["cpu"])

    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == ["0"]


def test_more_actions_than_boxes_are_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "_BOXES", 10)
    figure = timeline_picture(spans_of(6, (0, 1)), ["cpu 0", "cpu 1"])

    forward, *_ = figure.axes[0].images
    opaque = np.asarray(forward.get_array())[..., 3]
    # F0 of the second worker is after that of the first.
    assert opaque[0, 0] == 1 and opaque[1, 0] == 0
    assert opaque[0].sum() == pytest.approx(opaque[1].sum(), abs=6)
    assert len(figure.axes[0].images) == 3


def test_caller_has_one_lane_in_the_last_row() -> None:
    schedule = schedule_for("1f1b", 1, one_each(2))
    spans = [
        Span(schedule.worker_of(action), action, float(k), k + 1.0)
        for k, action in enumerate(schedule.interleaved)
    ]

    axes = timeline_picture(spans, ["cpu 0", "cpu 1", "caller"]).axes[0]

    # P0, F0, F0, L0, B0, B0, B0
    places = sorted(text.get_position() for text in axes.texts if text.get_text() == "0")
    assert [y for _, y in places] == pytest.approx([2, 0, 1, 2, 1, 0, 2])
    legend = axes.get_legend()
    assert legend is not None
    words = {text.get_text() for text in legend.get_texts()}
    assert words == {"forward", "backward", "prepare", "loss"}


def test_labels_of_stages_are_there_though_the_caller_has_no_room_for_any() -> None:
    schedule = schedule_for("1f1b", 20, one_each(1))
    spans, now = [], 0.0
    for action in schedule.interleaved:
        end = now + (1e-3 if action.by_caller else 1.0)
        spans.append(Span(schedule.worker_of(action), action, now, end))
        now = end

    texts = timeline_picture(spans, ["cpu", "caller"]).axes[0].texts

    found = sorted(text.get_text() for text in texts if text.get_text())
    assert found == sorted([str(i) for i in range(20)] * 2)
