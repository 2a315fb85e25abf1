"""Processes that miss their beats are reported once; those that are heard, or excused, are not.

The beats are counted, so that no test depends on how long they take.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest

from lightning_gpipe.core.transport.process_group import heartbeat
from lightning_gpipe.core.transport.process_group.heartbeat import Heartbeat
from tests.support.waiting import PATIENCE

RANKS = [1, 2]


class Watch:
    """A heartbeat with what it reports; ``after_beat`` is called on its thread."""

    def __init__(self, start: int = 1) -> None:
        self.sent = 0
        self.silent: list[list[int]] = []
        self.after_beat: Callable[[], None] = lambda: None
        lost_after = timedelta(seconds=0.02)
        self.heartbeat = Heartbeat(
            RANKS, lost_after, start, self.silent.append, self._send, self._on_beat
        )
        self._left = 0
        self._done = threading.Event()

    def run(self, beats: int) -> None:
        """Let it beat so many times."""
        self._left = beats
        self._done.clear()
        self.heartbeat.start()
        assert self._done.wait(PATIENCE)

    def _send(self) -> None:
        self.sent += 1

    def _on_beat(self) -> None:
        self.after_beat()
        self._left -= 1
        if self._left == 0:
            self.heartbeat.stop()
            self._done.set()


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_first_beat_is_sent_at_once(watch: Watch) -> None:
    watch.run(5)

    assert watch.sent == 1 + 5


def test_process_that_is_no_neighbour_may_be_silent(watch: Watch) -> None:
    watch.heartbeat.reset(3)

    watch.run(5 * watch.heartbeat.limit)

    assert watch.silent == [[1, 2]]


def test_silent_process_is_reported_once(watch: Watch) -> None:
    watch.after_beat = lambda: watch.heartbeat.reset(2)

    watch.run(5 * watch.heartbeat.limit)

    assert watch.silent == [[1]]


def test_processes_that_fall_silent_together_are_reported_together(watch: Watch) -> None:
    for rank in RANKS:
        watch.heartbeat.reset(rank)

    watch.run(5 * watch.heartbeat.limit)

    assert watch.silent == [[1, 2]]


def test_process_that_was_excused_may_be_silent(watch: Watch) -> None:
    watch.heartbeat.excuse(2)

    watch.run(5 * watch.heartbeat.limit)

    assert watch.silent == [[1]]


def test_process_that_is_heard_again_is_reported_again(watch: Watch) -> None:
    watch.heartbeat.excuse(2)
    watch.run(5 * watch.heartbeat.limit)
    watch.heartbeat.reset(1)

    watch.run(5 * watch.heartbeat.limit)

    assert watch.silent == [[1], [1]]


def test_process_may_take_longer_to_start() -> None:
    watch = Watch(start=10)

    watch.run(5 * watch.heartbeat.limit)
    assert watch.silent == []
    watch.run(20 * watch.heartbeat.limit)

    assert watch.silent == [[1, 2]]


def test_beats_that_were_missed_before_a_stop_do_not_count(watch: Watch) -> None:
    for rank in RANKS:
        watch.heartbeat.reset(rank)

    for _ in range(5):
        watch.run(watch.heartbeat.limit - 1)

    assert watch.silent == []


def test_processes_that_did_not_run_themselves_do_not_blame_one_another(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once two ranks did on a busy machine, each of whose beats was late."""
    for rank in RANKS:
        watch.heartbeat.reset(rank)
    now = itertools.count(step=10.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: next(now)))

    watch.run(5 * watch.heartbeat.limit)
    assert watch.silent == []

    watch.run(11 * watch.heartbeat.limit)
    assert watch.silent == [RANKS], "in the end"
